"""Recall by state size."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from benchmarks.report.plots import style, tidy
from lab.experiments.recall import best_runs, mixers_of


def points(runs: list[dict]) -> dict[str, list[tuple[int, list[float]]]]:
    """By mixer, (K, recall of each seed) at the selected learning rate."""
    runs, found = best_runs(runs), {}
    for mixer in mixers_of(runs):
        recalls: dict[int, list[float]] = {}
        for run in runs:
            if run['cell']['mixer'] == mixer:
                recalls.setdefault(run['cell']['state_size'], []).append(run['recall'])
        found[mixer] = sorted(recalls.items())
    return found


def draw(report: dict, path: Path | str) -> None:
    """A panel for each sequence length."""
    lengths: dict[int, list[dict]] = {}
    for run in report['runs']:
        lengths.setdefault(run['cell']['seq_len'], []).append(run)
    figure = Figure(figsize=(12, 3.6 * -(-len(lengths) // 2)), dpi=140, layout='constrained')
    axes = figure.subplots(-(-len(lengths) // 2), 2, sharex=True, sharey=True, squeeze=False).ravel()
    for axis, (length, runs) in zip(axes, lengths.items(), strict=False):
        draw_length(axis, runs)
        axis.set_title(f'{length} tokens, {runs[0]["cell"]["num_pairs"]} pairs')
    for axis in axes[len(lengths):]:
        axis.remove()
    figure.supylabel('recall', fontsize=10)
    figure.supxlabel('entries of a key, K', fontsize=10)
    figure.suptitle(report['setting']['title'], fontsize=11)
    figure.savefig(path)


def draw_length(axis: Axes, runs: list[dict]) -> None:
    found = points(runs)
    for mixer, some in found.items():
        sizes, options = [K for K, _ in some], style(mixer, list(found))
        axis.plot(sizes, [sum(x) / len(x) for _, x in some], **options)
        axis.vlines(sizes, [min(x) for _, x in some], [max(x) for _, x in some], color=options['color'], alpha=0.5)
    axis.set_ylim(0, 1.08)
    axis.set_xscale('log')
    sizes = sorted({K for some in found.values() for K, _ in some})
    axis.set_xticks(sizes, map(str, sizes))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    tidy(axis)
    axis.legend(frameon=False, fontsize=9)
