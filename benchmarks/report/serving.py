"""The results page's sections on vLLM."""

from __future__ import annotations

from statistics import median

from benchmarks.report.tables import measured_on, table


def load_of(machine: dict) -> str:
    return f'{measured_on(machine)} Load average at the end: {machine["load_average"]}, on {machine["cpu_count"]} cores.'


def spread(values: list[float], digits: int = 0) -> str:
    return f'{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})'


def ratios(some: list[float], others: list[float]) -> str:
    """Of each turn."""
    return spread([a / b for a, b in zip(some, others, strict=True)], 2)


def arrivals(report: dict) -> str:
    def latencies(row: dict, name: str) -> str:
        return ' / '.join(f'{ms:.1f}' for ms in row['latency_ms'][name].values())

    names = ('first token', 'per token', 'whole answer')
    lines = [
        [system['system'], f'{row["rate"]:.2f}', f'{row["tokens_per_s"]:.0f}', *(latencies(row, name) for name in names)]
        for i in range(len(report['systems'][0]['rows'])) for system in report['systems'] for row in [system['rows'][i]]
    ]
    peaks = ', '.join(
        f'{x["system"]} {x["peak_tokens_per_s"]:.0f} ({x["parameters"] / 1e6:.2f}M parameters)' for x in report['systems']
    )
    at_once: dict[tuple[int, bool], dict[str, list[float]]] = {}
    for x in report['peaks']:
        at_once.setdefault((x['slots'], x['compiled']), {})[x['system'].removeprefix('vllm ')] = x['tokens_per_s']

    compared = [
        [slots, 'compiled' if compiled else 'eager', *map(spread, found.values()),
         ratios(found['longhorn'], found['mamba2'])]
        for (slots, compiled), found in at_once.items()
    ]
    rows = {x['system']: x['rows'] for x in report['systems']}
    first = ' and '.join(
        f'{ratios(a["first_token_ms"], b["first_token_ms"])} at a load of {a["load"]}'
        for a, b in zip(rows['vllm longhorn'], rows['vllm mamba2'], strict=True)
    )
    (low, high), (fewest, most) = report['prompts'], report['answers']
    return (
        f'## Requests that arrive at random, on a CPU\n\n`python -m benchmarks arrivals`. {load_of(report["machine"])}\n\n'
        f'{report["requests"]} requests of a Poisson process, prompts of {low} to {high} tokens, answers of {fewest} to '
        f'{most}, {report["slots"]} at a time, random weights, float32. `generate` takes static batches, which wait at most '
        f'{report["wait_s"]} s. Latencies in ms are p50 / p90 / p99 over all turns, from the arrival; rates are medians. '
        f'Tokens per second with all requests there at once: {peaks}.\n\n'
        + table(['system', 'requests per s', 'tokens per s', *names], lines)
        + f'\n\nMedian of the first token, Longhorn over Mamba-2 in a turn: {first}.'
        '\n\nTokens per second of vLLM with all requests there at once (two for each place and six more), by how many it '
        'serves at a time: median of the turns (lowest to highest).\n\n'
        + table(['at a time', 'vLLM', 'Longhorn', 'Mamba-2', 'ratio'], compared)
    )


def serving_parts(report: dict) -> str:
    rows = report['rows']
    lines = [
        [name, *(f'{row["parts_ms"][name]:.2f} ({row["parts_ms"][name] / row["vllm_ms"]:.0%})' for row in rows)]
        for name in sorted(rows[0]['parts_ms'], key=lambda x: -rows[0]['parts_ms'][x])
    ]
    lines += [[f'**{label}**', *(f'{row[key]:.2f}' for row in rows)]
              for label, key in (('vLLM, a step', 'vllm_ms'), ('`generate`, a step', 'generate_ms'))]
    return (
        f'## A step of vLLM on a CPU\n\n`python -m benchmarks serving-parts`. {load_of(report["machine"])} Milliseconds, '
        'fastest of the repeats.\n\n'
        + table(['part', *(f'{row["requests"]} at a time' for row in rows)], lines)
    )
