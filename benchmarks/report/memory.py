"""The results page's sections on the memory that layers take, and on what recomputation costs."""

from __future__ import annotations

from textwrap import fill

from benchmarks.report.tables import measured_on, table

INTRODUCTION = """## Memory of a layer

`python -m benchmarks memory`. Counted, so the same on any device: bytes per token and unit of the model's width ({width}), in
bfloat16. *Kept* is what backward needs, including the layer's input. *Peak* is the most that a training step takes, without
parameters and their gradients. *Moved* is the least that its operations read and write, weights included: an operation counts
each of its tensors once. For Mamba and Mamba-2, the source of their fused blocks says what they save. The cache of
`softmax attention` grows with the {tokens} tokens, the others do not. Longhorn's, GLA's and the delta rules' states are
float32, Mamba's and Mamba-2's bfloat16."""
RECOMPUTED = """### What recomputation costs

`python -m benchmarks recompute`. Backward computes the convolution's output and the step sizes again. This adds to a layer's
training step:

{points}

The predictions are those of whole layers, below. The measurements are medians (and quartiles), width {width}, {tokens} tokens.
{machine}"""
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


def recomputation(report: dict, layers: dict) -> str:
    """The predicted share at the paper's sizes and the measured one in each dtype."""
    points, gpu, models = [], layers['rows'][0]['gpu'], dict.fromkeys(x['model'] for x in layers['rows'])
    steps = {(x['layer'], x['model']): x['us'] for x in layers['rows'] if x['pass'] == 'step'}
    for update in dict.fromkeys(x['update'] for x in report['measured']):
        name = f'Longhorn, {update}'
        shares = [f'{steps[name, m] / steps[f"{name}, recompute=False", m] - 1:.1%} ({m})' for m in models]
        ratios = [
            f'{x["ratio"] - 1:.1%} ({x["ratio_low"] - 1:.1%} to {x["ratio_high"] - 1:.1%}) in {x["dtype"]}'
            for x in report['measured'] if x['update'] == update
        ]
        points.append(f'- {update}: {" and ".join(shares)}, predicted for an {gpu}; {" and ".join(ratios)}, measured on a CPU')
    return RECOMPUTED.format(machine=measured_on(report['machine']), points='\n'.join(points), **report['measured'][0])
