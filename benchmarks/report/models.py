"""The results page's sections on models: training speed, time per generated token, size of the cache."""

from __future__ import annotations

from textwrap import fill

from benchmarks.report.tables import measured_on, place, table


def models(report: dict, title: str | None = None) -> str:
    """One row per model: training, and a token after the shortest and the longest prompt, in the first dtype and batch."""
    ran = [row for row in report['rows'] if row['status'] == 'ok']
    trained = any('training' in row for row in ran)
    measured = [(x['dtype'], x['batch']) for row in ran for x in row.get('generation', ())]
    ends = [report['size']['prompts'][i] for i in (0, -1)]
    rows = []
    for row in ran:
        found = {x['prompt']: x for x in row.get('generation', ()) if (x['dtype'], x['batch']) == measured[0]}
        cells = [f'{row["training"]["tokens_per_s"]:,.0f}' if 'training' in row else ''] if trained else []
        cells += [f'{found[n]["token"]["ms"]:.1f}' if n in found else '' for n in ends]
        cells += [f'{found[n]["state_bytes"] / 1e6:.2f}' if n in found else '' for n in ends]
        rows.append([row['model'], f'{row["parameters"]:,}', *cells])
    columns = ['model', 'parameters', *(['training, tokens/s'] if trained else [])]
    columns += [f'ms a token after {n}' for n in ends] + [f'cache after {n}, MB' for n in ends]
    where = f'; greedy decoding in {measured[0][0]}, batch {measured[0][1]}, medians' if measured else ''
    title = title or ('Models' if trained else 'Generation')
    return (
        f'## {title} on {place(report)}\n\n`python -m benchmarks model`, size '
        f'{report["name"]}. {measured_on(report["machine"])}'[:-1] + f'{where}.\n\n' + table(columns, rows)
    )


def generation(report: dict) -> str:
    """Time per token and cache after the longest prompt, in the first dtype and batch, of the models that read it."""
    ran = [row for row in report['rows'] if row['status'] == 'ok' and row.get('generation')]
    longest, first = report['size']['prompts'][-1], ran[0]['generation'][0]
    figures = [
        f'{row["model"]} {x["token"]["ms"]:.0f} ms and {x["state_bytes"] / 1e6:,.1f} MB' for row in ran
        for x in row['generation'] if (x['dtype'], x['batch'], x['prompt']) == (first['dtype'], first['batch'], longest)
    ]
    text = (
        f'At size {report["name"]}, a generated token after {longest:,} and the cache take: {"; ".join(figures)} '
        f'({first["dtype"]}, batch {first["batch"]}). {measured_on(report["machine"])}'
    )
    return fill(text, 127)
