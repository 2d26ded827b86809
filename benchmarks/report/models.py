"""The results page's sections of models: how fast they train, and what a token costs them."""

from __future__ import annotations

from benchmarks.report.tables import measured_on, milliseconds, place, table

GREEDY = """Greedy decoding. A time is that of one token after a prompt so long: the median in ms (and quartiles). "first" is
the time in ms until the first token, so mostly that of reading the prompt; "cache" is its size in the end. Both stand in the
order of the prompts. "s to compile" is what the first tokens of a compiled step took."""
# a report without `turns` is older than they are
TURNS, ONE_BY_ONE = 'The models took turns, a few tokens each.', 'The models ran one after the other, by `generate`.'


def size_of(report: dict) -> str:
    return ', '.join(f'{name} {value}' for name, value in report['size'].items())


def summary_row(row: dict) -> list[str]:
    """Parameters and training."""
    training = row.get('training')
    return [
        row['model'], f'{row["parameters"]:,}', f'{training["tokens_per_s"]:,.0f}' if training else '',
        milliseconds(training),
    ]


def generation(report: dict, dtype: str, batch: int) -> str:
    """A table of one dtype and batch; empty cells were left out."""
    prompts, rows = report['size']['prompts'], []
    for row in report['rows']:
        found = {x['prompt']: x for x in row.get('generation', ()) if (x['dtype'], x['batch']) == (dtype, batch)}
        if not found:
            continue
        warm = [x['warm_up_s'] for x in found.values() if 'warm_up_s' in x]
        any_prompt = next(iter(found.values()))
        rows.append([
            row['model'], f'{any_prompt["weight_bytes"] / 1e6:.1f}',
            *(milliseconds(found[n]['token']) if n in found else '' for n in prompts),
            ', '.join(f'{found[n]["first"]["ms"]:.0f}' for n in prompts if n in found),
            ', '.join(f'{found[n]["state_bytes"] / 1e6:.2f}' for n in prompts if n in found),
            f'{sum(warm):.0f}' if warm else '',
        ])
    columns = ['model', 'weights, MB', *(f'after {n}' for n in prompts), 'first', 'cache, MB', 's to compile']
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return f'{dtype}, batch {batch}:\n\n{table(columns, rows)}\n'


def models(report: dict) -> str:
    """What was trained, each dtype and batch of generation, and what was not run."""
    ran = [row for row in report['rows'] if row['status'] == 'ok']
    trained = any('training' in row for row in ran)
    groups = dict.fromkeys((x['dtype'], x['batch']) for row in ran for x in row.get('generation', ()))
    columns = ['model', 'parameters', 'training, tokens/s', 'ms a step']
    summaries = [summary_row(row) for row in ran]
    if not trained:
        columns, summaries = columns[:2], [row[:2] for row in summaries]
    compiled = any(row['model'].endswith('compiled') for row in ran)
    kind = 'Models' if trained else 'Compiled and int8 generation' if compiled else 'Generation'
    parts = [
        f'## {kind} on {place(report)}\n\n`python -m benchmarks model`, size '
        f'{report["name"]}. {measured_on(report["machine"])} {size_of(report)}.\n',
        table(columns, summaries) + '\n',
        f'{GREEDY} {TURNS if "turns" in report else ONE_BY_ONE}\n',
        *(generation(report, *group) for group in groups),
    ]
    reasons = {}
    for row in report['rows']:
        if row['status'] != 'ok':
            reasons.setdefault(row['reason'], []).append(row['model'])
        for x in row.get('left_out', ()) if row['status'] == 'ok' else ():
            where = f'{row["model"]} in {x["dtype"]}, batch {x["batch"]}, after {x["prompt"]} tokens'
            reasons.setdefault(x['reason'], []).append(where)
    if reasons:
        parts.append('Not run: ' + '; '.join(f'{", ".join(names)}: {reason}' for reason, names in reasons.items()) + '.')
    return '\n'.join(parts).rstrip('\n')
