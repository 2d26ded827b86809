"""The results page's section and picture of the memory that layers take."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report.plots import BLUE, FONT, GREYS, own, tidy
from benchmarks.report.tables import measured_on, table

INTRODUCTION = """## Memory of a layer

`python -m benchmarks memory`. Counted, so the same on any device: bytes of a token and of a unit of the model's width, {width}
here, in bfloat16. *Kept* is what backward needs, the layer's input among it; *peak* is the most that a training step takes,
without parameters and their gradients; *moved* is what its operations read and write at least, each tensor of an operation
counted once and weights too. Those of Mamba and Mamba-2 are what the source of their fused blocks saves. A cache of
`softmax attention` grows with the {tokens} tokens, the others' do not. Longhorn's, GLA's and the delta rules' states are in
float32, Mamba's and Mamba-2's in bfloat16."""
RECOMPUTED = """`python -m benchmarks recompute`: what it adds to a training step of a layer that backward computes the
convolution's output and the step sizes again. *Predicted* for an {gpu}: the operators as on this page below; all else,
recomputation and the norm before the layer included, by what its bytes or products take at least. Measured on a CPU, width
{width}: {pairs} pairs of steps of {tokens} tokens in turn (five times as many in float32), by the process's own time; medians
(and quartiles) of the ratios. {machine}"""
SCRATCH = """What the operators' backward takes at most beside its arguments and results, in bytes of a token and of a channel
of the mixer, of which there are two a unit of width. The diagonal update's partial sums of dq and dk are those of a half of
each row (up to K = 32) or a quarter: backward goes through long rows in slices. Packed sequences are taken whole: there
these sums take (K + 2) / 4 bytes. Of the exact update's 14 at K = 128, 8 are states and their gradients every 64 tokens."""


def memory(report: dict) -> str:
    rows = [
        [x['layer'], f'{x["kept"]:.1f}', *('' if x[name] is None else f'{x[name]:.1f}' for name in ('peak', 'moved')),
         f'{x["cache"] / 1024:,.0f}']
        for x in report['rows']
    ]
    scratch = [[x['K'], f'{x["diagonal"]:.1f}', f'{x["exact"]:.1f}'] for x in report['scratch']]
    return '\n\n'.join([
        INTRODUCTION.format(**report), table(['layer', 'kept', 'peak', 'moved', 'cache of a sequence, KiB'], rows),
        SCRATCH, table(['K', 'diagonal', 'exact'], scratch),
    ])


def recomputation(report: dict) -> str:
    """The predicted share for each of the paper's sizes, and what was measured for each dtype."""
    first, columns, lines = report['measured'][0], [], []
    for update in dict.fromkeys(x['update'] for x in report['predicted']):
        shares = {f'{x["gpu"]}, {x["model"]}': f'{x["share"]:.1%}' for x in report['predicted'] if x['update'] == update}
        ratios = {
            f'CPU, {x["dtype"]}': f'{x["ratio"] - 1:.1%} ({x["ratio_low"] - 1:.1%} to {x["ratio_high"] - 1:.1%})'
            for x in report['measured'] if x['update'] == update
        }
        columns = ['update', *shares, *ratios]
        lines.append([update, *shares.values(), *ratios.values()])
    text = RECOMPUTED.format(machine=measured_on(report['machine']), gpu=report['predicted'][0]['gpu'], **first)
    return '### What recomputation costs\n\n' + text + '\n\n' + table(columns, lines)


def draw(report: dict, path: Path) -> None:
    """A bar a layer: kept, and the peak behind it."""
    rows = report['rows'][::-1]
    figure = Figure(figsize=(7, 0.32 * len(rows) + 0.9), layout='constrained')
    axis = figure.subplots()
    names = [row['layer'] for row in rows]
    axis.barh(names, [row['peak'] or 0 for row in rows], color=GREYS[2], alpha=0.45, height=0.7, label='peak of a step')
    colors = [BLUE if own(name) else GREYS[0] for name in names]
    bars = axis.barh(names, [row['kept'] for row in rows], color=colors, height=0.45)
    axis.bar_label(bars, fmt='%.1f', fontsize=FONT, padding=2)
    axis.set(xlabel='bytes of a token and unit of width; in front: kept for backward', title='Memory of a layer in training')
    axis.legend(fontsize=FONT, frameon=False)
    tidy(axis)
    figure.savefig(path, dpi=150)
