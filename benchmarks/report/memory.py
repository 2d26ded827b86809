"""The results page's sections on the memory that layers take."""

from __future__ import annotations

from textwrap import fill

from benchmarks.report.tables import table

INTRODUCTION = """## Memory of a layer

`python -m benchmarks memory`. Counted, so the same on any device: bytes per token and unit of the model's width ({width}), in
bfloat16. *Kept* is what backward needs, including the layer's input. *Peak* is the most that a training step takes, without
parameters and their gradients. *Moved* is the least that its operations read and write, weights included: an operation counts
each of its tensors once. For Mamba and Mamba-2, the source of their fused blocks says what they save. The cache of
`softmax attention` grows with the {tokens} tokens, the others do not. Longhorn's, GLA's and the delta rules' states are
float32, Mamba's and Mamba-2's bfloat16."""
SCRATCH = (
    'In backward, the operators also take scratch memory, in bytes per token and channel of the mixer (two channels per unit '
    'of width) at most {bytes}; the diagonal update takes more for packed sequences.'
)


def memory(report: dict) -> str:
    rows = [
        [x['layer'], f'{x["kept"]:.1f}', *('' if x[name] is None else f'{x[name]:.1f}' for name in ('peak', 'moved')),
         f'{x["cache"] / 1024:,.0f}']
        for x in report['rows']
    ]
    ends = (report['scratch'][0], report['scratch'][-1])
    scratch = [f'{x["diagonal"]:.1f} (diagonal) or {x["exact"]:.1f} (exact) at K = {x["K"]}' for x in ends]
    return '\n\n'.join([
        INTRODUCTION.format(**report), table(['layer', 'kept', 'peak', 'moved', 'cache of a sequence, KiB'], rows),
        fill(SCRATCH.format(bytes=', '.join(scratch)), 127),
    ])
