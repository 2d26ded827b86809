"""Recall by state size against the predicted time of the operator on a GPU: what a larger state gives, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from benchmarks.report.page import ROOT
from benchmarks.report.plots import style, tidy
from lab.experiments.recall import best_runs, mixers_of

PREDICTED = ROOT / 'benchmarks' / 'results' / 'predicted.json'
GPU, B, T, V = 'H100', 8, 2048, 4096


def predicted_ms(mixer: str, K: int) -> float | None:
    """Forward and backward at the benchmarks' main shape, or `None` where they are not predicted."""
    rows = json.loads(PREDICTED.read_text())['rows']
    times = [
        row['ms'] for row in rows
        if [row[name] for name in ('gpu', 'B', 'T', 'V', 'K')] == [GPU, B, T, V, K] and row['pass'].rpartition('_')[0] == mixer
    ]
    return sum(times) if len(times) == 2 else None


def points(runs: list[dict]) -> dict[str, list[tuple[int, float | None, list[float]]]]:
    """By mixer, (K, predicted ms, recall of each seed) at the selected learning rate."""
    runs, found = best_runs(runs), {}
    for mixer in mixers_of(runs):
        recalls: dict[int, list[float]] = {}
        for run in runs:
            if run['cell']['mixer'] == mixer:
                recalls.setdefault(run['cell']['state_size'], []).append(run['recall'])
        found[mixer] = [(K, predicted_ms(mixer, K), recalls[K]) for K in sorted(recalls)]
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
    figure.supxlabel(f'predicted ms, forward and backward, {GPU} (B = {B}, T = {T:,}, V = {V:,})', fontsize=10)
    figure.suptitle(report['setting']['title'], fontsize=11)
    figure.savefig(path)


def draw_length(axis: Axes, runs: list[dict]) -> None:
    found = points(runs)
    for mixer, some in found.items():
        known = [(K, ms, recalls) for K, ms, recalls in some if ms is not None]
        times, means = [ms for _, ms, _ in known], [sum(x) / len(x) for *_, x in known]
        options = style(mixer, list(found))
        axis.plot(times, means, **options)
        axis.vlines(times, [min(x) for *_, x in known], [max(x) for *_, x in known], color=options['color'], alpha=0.5)
        for i, ((K, ms, _), mean) in enumerate(zip(known, means, strict=True)):
            axis.annotate(
                f'K = {K}', (ms, mean), (4, 6 if i % 2 else -11), textcoords='offset points', fontsize=8,
                color=options['color'],
            )
    axis.set_ylim(0, 1.08)
    axis.set_xscale('log')
    axis.set_xticks([1, 2, 5, 10, 20], ['1', '2', '5', '10', '20'])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    tidy(axis)
    axis.legend(frameon=False, fontsize=9)
