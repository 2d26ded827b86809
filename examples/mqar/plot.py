"""The picture: recall over training, and by number of pairs; each line is labelled."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

BLUE, ORANGE, GREEN, GREY = '#1f5fa8', '#d9822b', '#3f8f5f', '#8a8f98'
FONT = 8


def draw_figure(report: dict, path: Path) -> None:
    """Draw `report` (the JSON) to a PNG 1800 pixels wide."""
    figure = Figure(figsize=(9, 3.7), dpi=200, layout='constrained')
    over_training, by_pairs = figure.subplots(1, 2)
    plot_training(over_training, report)
    plot_pairs(by_pairs, report)
    options = report['options']
    layers = options['num_hidden_layers']
    form = '' if report['beside'] else f', {report["form"]} form,'
    figure.suptitle(
        f'Longhorn{form} on multi-query associative recall: {layers} layer{"s" * (layers > 1)}, '
        f'width {options["hidden_size"]}, '
        f'state {options["state_size"]} ({report["parameters"] / 1e3:.0f}k parameters)',
        fontsize=11,
    )
    figure.savefig(path)


def plot_training(axes, report: dict) -> None:
    target = report['options']['target_recall']
    evaluations = recall_over_training(report)
    axes.axhline(target, color=GREY, linestyle=':', linewidth=1)
    axes.text(0, target - 0.02, f'target: {target:.0%}', color=GREY, va='top', fontsize=FONT)
    axes.plot(*zip(*evaluations, strict=True), color=BLUE, marker='o', markersize=3, label=outcome(report))
    if report['beside']:
        steps, recalls = zip(*recall_over_training(report['beside']), strict=True)
        label = outcome(report['beside'])
        axes.plot(steps, recalls, color=GREEN, linestyle='-.', marker='^', markersize=3, linewidth=1, label=label)
    axes.legend(loc='lower right', fontsize=FONT, frameon=False)
    # after the last line, so that the axis holds all
    axes.set(title='Recall on unseen sequences, over training', xlabel='step', ylabel='recall', xlim=(0, None))
    finish(axes)


def recall_over_training(figures: dict) -> list[tuple[int, float]]:
    return [(entry['step'], entry['eval_recall']) for entry in figures['history'] if 'eval_recall' in entry]


def outcome(figures: dict) -> str:
    return f'{figures["form"]} form, {figures["recall"]:.1%} after {figures["steps"]} steps'


def plot_pairs(axes, report: dict) -> None:
    results = report['recall_by_pairs']
    trained = [(r['num_pairs'], r['recall']) for r in results if r['trained']]
    beyond = [(r['num_pairs'], r['recall']) for r in results if not r['trained']]
    axes.plot(*zip(*trained, strict=True), color=BLUE, marker='o', markersize=4)
    axes.text(*centre(trained, -0.04), 'as many pairs as in training', color=BLUE, ha='center', va='top', fontsize=FONT)
    if beyond:
        axes.axvspan(trained[-1][0], beyond[-1][0] + 0.5, color=ORANGE, alpha=0.08, linewidth=0)
        axes.plot(
            *zip(trained[-1], *beyond, strict=True), color=ORANGE, linestyle='--', marker='s', markersize=4,
            markevery=slice(1, None),
        )
        low = min(recall for _, recall in beyond)
        label = f'{report["form"]} form, more pairs,\nin longer sequences'
        axes.text(beyond[-1][0], low - 0.04, label, color=ORANGE, ha='right', va='top', fontsize=FONT)
    if beside := report['beside']:
        counts, recalls = zip(*((r['num_pairs'], r['recall']) for r in beside['recall_by_pairs']), strict=True)
        axes.plot(counts, recalls, color=GREEN, linestyle='-.', marker='^', markersize=3, linewidth=1)
    counts = [r['num_pairs'] for r in results]
    guesses = [(n, sum(1 / i for i in range(1, n + 1)) / n) for n in counts]
    axes.plot(*zip(*guesses, strict=True), color=GREY, linestyle=':', linewidth=1)
    # above the highest point that it spans
    axes.text(counts[-1], guesses[len(guesses) // 2][1] + 0.02, 'guessing among the\nvalues not yet asked for', color=GREY,
              ha='right', va='bottom', fontsize=FONT)
    axes.set(title='By number of key-value pairs', xlabel='pairs in the sequence', ylabel='recall')
    finish(axes)


def centre(points: list[tuple[float, float]], below: float) -> tuple[float, float]:
    """The position of a line's label: in its middle, this far from its lowest point."""
    xs, ys = zip(*points, strict=True)
    return (xs[0] + xs[-1]) / 2, min(ys) + below


def finish(axes) -> None:
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    axes.title.set_fontsize(10)
