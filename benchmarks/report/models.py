"""The results page's sections of models: how fast they train, and what a token costs them."""

from __future__ import annotations

from benchmarks.report.tables import measured_on, place, table


def models(report: dict) -> str:
    """A row a model: training, and a token after the shortest and the longest prompt, in the first dtype and batch."""
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
    return (
        f'## {"Models" if trained else "Generation"} on {place(report)}\n\n`python -m benchmarks model`, size '
        f'{report["name"]}. {measured_on(report["machine"])}'[:-1] + f'{where}.\n\n' + table(columns, rows)
    )
