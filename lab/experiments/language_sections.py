"""Sections of the experiments' page on language models."""

from __future__ import annotations

import math

from benchmarks.report.tables import table
from lab.experiments.sections import heading, machines, predictions, spread


def language_modeling(report: dict) -> str:
    rows = []
    for name, runs in by_model(report['runs']):
        losses = [run['loss'] for run in runs]
        rows.append([name, f'{runs[0]["parameters"]:,}', spread(losses, '.4f'),
                     f'{math.exp(sum(losses) / len(losses)):.3f}', len(runs)])
    columns = ['model', 'parameters', 'held-out loss (nats per token)', 'perplexity', 'seeds']
    setting = report['setting']
    text = f'{setting["training"]["max_steps"]} steps. {setting.get("note", "")}'.rstrip()
    parts = [heading(report, text, 'language_modeling'), table(columns, rows)]
    if 'search' in setting:
        parts.append(searched(report))
    if 'predictions' in setting:
        parts.append(predictions(setting))
    return '\n\n'.join(parts)


def searched(report: dict) -> str:
    """The short runs of each model, at all rates."""
    search = report['setting']['search']
    minutes = {name: [run['seconds'] / 60 for run in runs] for name, runs in by_model(report['runs'])}
    rates, rows = sorted({run['learning_rate'] for run in report['search']}), []
    for name, runs in by_model(report['search']):
        losses = {run['learning_rate']: run['loss'] for run in runs}
        tried = (f'{losses[rate]:.4f}' if rate in losses else '-' for rate in rates)
        rows.append([name, *tried, min(losses, key=losses.get), spread(minutes[name], '.1f')])
    return (
        f'The rate is selected by the loss after {search["max_steps"]} steps, on held-out text that the table above does not '
        'have. Lower and higher rates were tried while the lowest or the highest was the best. The minutes are processor time '
        'of the runs above.\n\n'
        + table(['model', *(f'rate {rate:g}' for rate in rates), 'selected', 'minutes'], rows)
    )


def by_model(runs: list[dict]) -> list[tuple[str, list[dict]]]:
    return [(name, [run for run in runs if run['model'] == name]) for name in dict.fromkeys(run['model'] for run in runs)]


def extrapolation(report: dict) -> str:
    ends = [x['end'] for x in report['runs'][0]['spans']]
    shown = [i for i, end in enumerate(ends) if (i + 1) & i == 0 or i == len(ends) - 1]
    rows = []
    for name, runs in by_model(report['runs']):
        cells = []
        for i in shown:
            values = [run['spans'][i]['perplexity'] for run in runs]
            cells.append(spread(values, '.2f'))
        rows.append([name, *cells])
    name = report.get('name', 'lm_small')
    return (f'## Length extrapolation, {name}\n\n`python -m lab.experiments extrapolation outputs/{name}/results.json`. Each '
            f'model was trained on {report["block_size"]} tokens at a time. It then reads {report["texts"]} longer held-out '
            f'texts from an empty state. The table has the perplexity of the {report["block_size"]} tokens up to a position: '
            'mean over the seeds (lowest to highest).\n\n'
            + table(['model', *(f'up to {ends[i]}' for i in shown)], rows))


def state_dtypes(report: dict) -> str:
    """What rounding a state after each token changes, beside what 16 bits of weights do."""
    setting = report['setting']
    rows = [
        [x['model'], x['stored'], *(f'{x[key]:.1e}' for key in ('kl_start', 'kl', 'kl_end')), f'{x["loss"]:.4f}']
        for x in report['rows']
    ]
    name = setting['name']
    columns = ['model', 'stored in 16 bits', 'divergence, first', 'all', 'last', 'loss']
    return (
        f'## {setting["title"]}\n\n`python -m lab.experiments language_modeling lab/experiments/settings/{name}.json`, then '
        f'`python -m lab.experiments state_dtypes outputs/{name}/results.json`. '
        f'{machines(report)} {setting["note"]} Each model '
        f'reads {report["texts"]} held-out texts of {report["tokens"]:,} tokens, one token at a time, and its states are '
        "rounded after each. Divergence is that of its next tokens' probabilities from the model's with float32 states, in "
        'nats: over the first eighth of a text, all of it, and the last eighth.\n\n'
        + table(columns, rows) + '\n\n' + predictions(setting)
    )
