"""The results page's section and picture of the memory that layers take."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report.plots import BLUE, FONT, GREYS, own, tidy
from benchmarks.report.tables import table

INTRODUCTION = """## Memory of a layer

`python -m benchmarks memory`. Counted, so the same on any device: bytes of a token and of a unit of the model's width, {width}
here, in bfloat16. *Kept* is what backward needs, the layer's input among it; *peak* is the most that a training step takes,
without parameters and their gradients; *moved* is what its operations read and write at least, each tensor of an operation
counted once and weights too. Those of Mamba and Mamba-2 are what the source of their fused blocks saves. A cache of
`softmax attention` grows with the {tokens} tokens, the others' do not. Longhorn's, GLA's and the delta rules' states are in
float32, Mamba's and Mamba-2's in bfloat16."""
SCRATCH = """What the operators' backward takes at most beside its arguments and results, in bytes of a token and of a channel
of the mixer, of which there are two a unit of width:"""


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
