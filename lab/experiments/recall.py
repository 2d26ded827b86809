"""The recalls of a grid's runs: the learning rate that they select, the result, and the picture.

If a grid has several learning rates, one is selected for all seeds, by the mean recall on validation sequences at the end of
training. The result is the recall at that rate on test sequences, with the spread over the seeds.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.report.plots import label_ends, shown, style, tidy

# options in the pictures
LABELS = {'seq_len': 'sequence length', 'hidden_size': 'width', 'state_size': 'state size'}


def best_runs(runs: list[dict]) -> list[dict]:
    """All seeds of the learning rate with the best mean validation recall, for each combination of the other options.

    A rate with fewer seeds than another is not selected: its grid is unfinished.
    """
    groups: dict[str, dict[float | None, list[dict]]] = {}
    for run in runs:
        key = json.dumps({name: x for name, x in run['cell'].items() if name not in ('learning_rate', 'seed')}, sort_keys=True)
        groups.setdefault(key, {}).setdefault(run['cell'].get('learning_rate'), []).append(run)
    return [run for rates in groups.values() for run in max(rates.values(), key=validation_recall)]


def validation_recall(runs: list[dict]) -> tuple[int, float]:
    """Seeds, and their mean recall on validation sequences at the end of training."""
    return len(runs), sum(run['history'][-1][1] for run in runs) / len(runs)


def summarize(runs: list[dict], names: list[str]) -> list[dict]:
    """Mean, lowest and highest recall over the seeds, for each combination of the options `names`."""
    groups = {}
    for run in best_runs(runs):
        groups.setdefault(tuple(run['cell'][name] for name in names), []).append(run['recall'])
    return [
        dict(zip(names, key, strict=True)) | {'mean': sum(x) / len(x), 'lowest': min(x), 'highest': max(x), 'seeds': len(x)}
        for key, x in groups.items()
    ]


def draw(report: dict, path: Path | str) -> None:
    """One panel per value of the setting's `panels` (an option, or a list); runs as dots if there are too few x for a line."""
    x_name = report['setting']['plot']['x']
    if x_name != 'step' and len({run['cell'][x_name] for run in report['runs']}) < 3:
        draw_runs(report, path)
    else:
        draw_lines(report, path)


def draw_lines(report: dict, path: Path | str) -> None:
    """One line per mixer at the selected learning rate, with the seeds as a band around their mean."""
    plot = report['setting']['plot']
    x_name, runs = plot['x'], best_runs(report['runs'])
    names = plot['panels'] if isinstance(plot['panels'], list) else [plot['panels']]

    def panel_of(run: dict) -> tuple:
        return tuple(run['cell'][name] for name in names)

    # panels without an option come before those with one
    panels = sorted({panel_of(run) for run in runs}, key=lambda panel: [(x is not None, x) for x in panel])
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.1 * columns, 3.2 * rows), dpi=140, layout='constrained')
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    lost = {mixer: [1 - run['recall'] for run in runs if run['cell']['mixer'] == mixer] for mixer in mixers_of(runs)}
    mixers = shown(list(lost), {mixer: sum(x) / len(x) for mixer, x in lost.items()})
    for panel, axis in zip(panels, axes, strict=False):
        for mixer in mixers:
            curves = [
                run['history'] if x_name == 'step' else [(run['cell'][x_name], run['recall'])]
                for run in runs if (panel_of(run), run['cell']['mixer']) == (panel, mixer)
            ]
            # a grid may be unfinished
            if not curves:
                continue
            points = {}
            for x, recall in sorted(itertools.chain(*curves)):
                points.setdefault(x, []).append(recall)
            # seeds that stopped early have no later points
            means, low, high = ([f(x) for x in points.values()] for f in (lambda x: sum(x) / len(x), min, max))
            options = style(mixer, mixers)
            axis.plot(list(points), means, **options)
            axis.fill_between(list(points), low, high, color=options['color'], alpha=0.12, linewidth=0)
        title = ', '.join(f'{LABELS.get(name, name)} {x}' for name, x in zip(names, panel, strict=True))
        axis.set(title=title, xlabel=LABELS.get(x_name, x_name), ylim=(0, 1.03))
        if x_name != 'step':
            axis.set_xscale('log', base=2)
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        tidy(axis)
    for axis in axes[::columns]:
        axis.set_ylabel('recall')
    for axis in axes[len(panels):]:
        axis.remove()
    figure.suptitle(report['setting']['title'], fontsize=11)
    for axis in axes[:len(panels)]:
        label_ends(axis)
    figure.savefig(path)


def draw_runs(report: dict, path: Path | str) -> None:
    """Every run's recall as a dot, hollow for the higher learning rate, with the mean at the selected rate as a bar."""
    plot, runs = report['setting']['plot'], report['runs']
    panels = sorted({(run['cell'][plot['x']], run['cell'][plot['panels']]) for run in runs})
    columns = len({panel for _, panel in panels})
    rates = sorted({run['cell']['learning_rate'] for run in runs})
    lost = {mixer: [1 - run['recall'] for run in runs if run['cell']['mixer'] == mixer] for mixer in mixers_of(runs)}
    mixers = shown(list(lost), {mixer: sum(x) / len(x) for mixer, x in lost.items()})
    figure = Figure(figsize=(10, 0.8 + 2.2 * len(panels) / columns), dpi=140, layout='constrained')
    axes = figure.subplots(-(-len(panels) // columns), columns, sharex=True, sharey=True, squeeze=False).ravel()
    for (x, panel), axis in zip(panels, axes, strict=True):
        some = [run for run in runs if (run['cell'][plot['x']], run['cell'][plot['panels']]) == (x, panel)]
        best = best_runs(some)
        for i, mixer in enumerate(mixers):
            color = style(mixer, mixers)['color']
            for j, rate in enumerate(rates):
                cells = [(run['recall'], run['cell']) for run in some]
                recalls = [x for x, cell in cells if (cell['mixer'], cell['learning_rate']) == (mixer, rate)]
                axis.scatter(recalls, [i - 0.14 + 0.28 * j / max(len(rates) - 1, 1)] * len(recalls), s=22, edgecolors=color,
                             facecolors='none' if j else color, linewidths=1.1, clip_on=False, zorder=3)
            chosen = [run['recall'] for run in best if run['cell']['mixer'] == mixer]
            axis.vlines(sum(chosen) / len(chosen), i - 0.32, i + 0.32, color=color, linewidth=2)
        names = {name: LABELS.get(name, name) for name in (plot['panels'], plot['x'])}
        axis.set(title=f'{names[plot["panels"]]} {panel}, {names[plot["x"]]} {x}', xlim=(0, 1.02))
        axis.set_yticks(range(len(mixers)), mixers)
        axis.xaxis.set_major_formatter(PercentFormatter(1))
        tidy(axis)
    axes[0].invert_yaxis()
    for axis in axes[::columns]:
        for label, mixer in zip(axis.get_yticklabels(), mixers, strict=True):
            label.set_color(style(mixer, mixers)['color'])
    for axis in axes[-columns:]:
        axis.set_xlabel('recall')
    key = ', '.join(f'{kind}: learning rate {rate}' for kind, rate in zip(('filled', 'hollow'), rates, strict=False))
    figure.suptitle(f'{report["setting"]["title"]}\nEvery run ({key}). Bars: mean over seeds of the chosen rate', fontsize=10)
    figure.savefig(path)


def mixers_of(runs: list[dict]) -> list[str]:
    return list(dict.fromkeys(run['cell']['mixer'] for run in runs))
