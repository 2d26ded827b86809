"""The picture: accuracy over training, and a sheet of held-out digits with the model's answers."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import Image

COLOURS = {'both directions': '#1f5fa8', 'both directions, exact': '#d9822b', 'one direction': '#6fa3d8', 'ViT': '#8a8f98'}
COLUMNS, ROWS = 8, 4


def draw_figure(runs: list[dict], digits: list[Image.Image], answers: list[dict], path: Path) -> None:
    """`runs` and `answers` are those of the JSON, `digits` the images of the answers."""
    figure = Figure(figsize=(10, 4), dpi=200, layout='constrained')
    left, right = figure.subfigures(1, 2, width_ratios=[1.25, 1])
    plot_accuracy(left.subplots(), runs)
    right.suptitle('Held-out digits and answers (truth in brackets where wrong)', fontsize=9)
    panels = right.subplots(ROWS, COLUMNS).flat
    for panel in panels:
        panel.set_axis_off()
    for panel, image, answer in zip(right.axes, digits, answers, strict=False):
        wrong = answer['answer'] != answer['truth']
        panel.imshow(image, cmap='gray')
        panel.set_title(f'{answer["answer"]} ({answer["truth"]})' if wrong else answer['answer'], fontsize=8,
                        color='#b02a2a' if wrong else 'black')
    figure.savefig(path)


def plot_accuracy(axes, runs: list[dict]) -> None:
    """One line per run, labelled with its model at the end of the first one."""
    ends = []
    for run in runs:
        colour = COLOURS[run['model']]
        points = list(enumerate(run['history'], start=1))
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, alpha=1 if run['seed'] == 0 else 0.45)
        if run['seed'] == 0:
            ends.append((points[-1], run['model'], colour))
    # names below each other, in the order of the lines
    ends.sort(key=lambda end: -end[0][1])
    for i, ((epoch, _), name, colour) in enumerate(ends):
        axes.text(epoch, 0.945 - 0.012 * i, name, color=colour, ha='right', fontsize=8)
    axes.set(title='Accuracy on held-out digits', xlabel='epoch', ylim=(0.85, 1), xlim=(0, None))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[['top', 'right']].set_visible(False)
    axes.title.set_fontsize(10)
