"""The picture of what two layers need (`settings/mqar_depth.json`): recall in training, one line per change."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.report.plots import BLUE, GREEN, GREYS, ORANGE, label_ends, tidy

COLOURS = (BLUE, GREYS[0], ORANGE, GREEN, GREYS[1], GREYS[2])


def draw(report: dict, path: Path | str) -> None:
    """Left, every run's recall on validation sequences; right, the losses of our model and of the one in plain PyTorch."""
    figure = Figure(figsize=(11.5, 4), dpi=140, layout='constrained')
    recall, loss = figure.subplots(1, 2, width_ratios=[1.25, 1])
    for i, run in enumerate(report['runs']):
        steps, recalls = zip(*run['history'], strict=True)
        recall.plot(steps, recalls, color=COLOURS[i % len(COLOURS)], marker='o', markersize=3, label=run['cell']['change'])
    recall.set(title='Recall on validation sequences', xlabel='step', ylim=(0, 1.03))
    recall.yaxis.set_major_formatter(PercentFormatter(1))
    plain = report['plain']
    steps = range(1, len(plain['ours']) + 1)
    loss.plot(steps, plain['ours'], color=BLUE, linewidth=3, alpha=0.4, label='Longhorn')
    loss.plot(steps, plain['plain'], color=GREYS[0], linewidth=1, linestyle='--', label='plain PyTorch')
    loss.set(title='Training loss, 2 layers, same weights and data', xlabel='step', ylabel='nats')
    for axis in (recall, loss):
        tidy(axis)
    figure.suptitle(report['setting']['title'], fontsize=11)
    for axis in (recall, loss):
        label_ends(axis)
    figure.savefig(path)
