"""The picture: recall and loss over training, and recall by number of pairs."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

BLUE, ORANGE, GREY = '#1f5fa8', '#d9822b', '#8a8f98'


def draw_figure(report: dict, path: Path) -> None:
    """Draw what `report` (the JSON) holds, to a PNG 1800 pixels wide."""
    figure = Figure(figsize=(9, 3.7), dpi=200, layout='constrained')
    over_training, by_pairs = figure.subplots(1, 2)
    plot_training(over_training, report)
    plot_pairs(by_pairs, report)
    options = report['options']
    layers = options['num_hidden_layers']
    figure.suptitle(
        f'Longhorn on multi-query associative recall: {layers} layer{"s" * (layers > 1)}, width {options["hidden_size"]}, '
        f'state {options["state_size"]} ({report["parameters"] / 1e3:.0f}k parameters)',
        fontsize=11,
    )
    figure.savefig(path)


def plot_training(axes, report: dict) -> None:
    history, target = report['history'], report['options']['target_recall']
    evaluations = [(entry['step'], entry['eval_recall']) for entry in history if 'eval_recall' in entry]
    losses = [(entry['step'], entry['loss']) for entry in history if 'loss' in entry]
    loss_axes = axes.twinx()
    loss, = loss_axes.plot(*zip(*losses, strict=True), color=GREY, linewidth=1, label='training loss (right axis)')
    loss_axes.set(ylabel='loss', ylim=(0, None))
    loss_axes.spines['top'].set_visible(False)
    recall, = axes.plot(
        *zip(*evaluations, strict=True), color=BLUE, marker='o', markersize=3, label='recall on unseen sequences',
    )
    goal = axes.axhline(target, color=GREY, linestyle=':', linewidth=1, label=f'target: {target:.0%}')
    axes.set(title='Over training', xlabel='step', ylabel='recall')
    finish(axes, [recall, goal, loss])


def plot_pairs(axes, report: dict) -> None:
    results = report['recall_by_pairs']
    trained = [(r['num_pairs'], r['recall']) for r in results if r['trained']]
    beyond = [(r['num_pairs'], r['recall']) for r in results if not r['trained']]
    handles = axes.plot(*zip(*trained, strict=True), color=BLUE, marker='o', markersize=4, label='as many as in training')
    if beyond:
        axes.axvspan(trained[-1][0], beyond[-1][0] + 0.5, color=ORANGE, alpha=0.08, linewidth=0)
        handles += axes.plot(
            *zip(trained[-1], *beyond, strict=True), color=ORANGE, linestyle='--', marker='s', markersize=4,
            markevery=slice(1, None), label='more pairs, longer sequences than in training',
        )
    counts = [r['num_pairs'] for r in results]
    handles += axes.plot(
        counts, [sum(1 / i for i in range(1, n + 1)) / n for n in counts], color=GREY, linestyle=':', linewidth=1,
        label='guessing among the values not asked yet',
    )
    axes.set(title='By number of key-value pairs', xlabel='pairs in the sequence', ylabel='recall')
    finish(axes, handles)


def finish(axes, handles) -> None:
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines['top'].set_visible(False)
    axes.legend(handles=handles, fontsize=8, frameon=False, loc='center right')
