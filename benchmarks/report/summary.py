"""The part of the README that `python -m benchmarks report` writes from the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from textwrap import fill

START, END = '<!-- drawn by python -m benchmarks report -->\n', '<!-- to here -->\n'
# a link must not be broken
WHOLE = {'break_long_words': False, 'break_on_hyphens': False}


def passes(report: dict) -> str:
    """Forward and backward on the GPU that has timed them."""
    K = 16
    ms = {row['pass']: row['ms'] for row in report['rows'] if row['K'] == K}
    shape = report['rows'][0]

    def both(name: str) -> str:
        return f'{ms[f"{name}_fwd"] + ms[f"{name}_bwd"]:.2f} ms'

    return (
        f'- **Speed on a GPU.** Forward and backward of the operator take {both("exact")} in the exact form, '
        f'{both("diagonal")} in the diagonal one, and of `chunk_delta_rule` {both("chunk_delta_rule")} '
        f'({report["machine"]["device"]}, B = {shape["B"]}, T = {shape["T"]}, V = {shape["V"]}, K = {K}, bfloat16; Longhorn '
        'with its gate and skip connection). [Each pass](docs/results.md#passes-measured-on-nvidia-h200); [on a '
        'CPU](docs/results.md#operators-on-a-cpu).'
    )


def memory(report: dict) -> str:
    """A layer in training, beside those of the same width."""
    kept, peak = ({row['layer']: row[name] for row in report['rows']} for name in ('kept', 'peak'))
    own, mamba = kept['Longhorn'], kept['Mamba, by its source']
    return (
        f'- **Memory in training.** For backward, a Longhorn layer of either form saves {own:.0f} bytes per token and unit of '
        f"model width (counted, bfloat16). Mamba's fused block saves {mamba:.0f}, fla's GLA {kept['GLA']:.0f}, DeltaNet "
        f"{kept['DeltaNet']:.0f} and KDA {kept['KDA']:.0f}, softmax attention {kept['softmax attention']:.0f}. "
        f"At its peak a step takes {peak['Longhorn exact']:.0f} (exact) or {peak['Longhorn']:.0f}, GLA {peak['GLA']:.0f}. "
        '[All layers](docs/results.md#memory-of-a-layer).'
    )


def extrapolation(report: dict) -> str:
    """Perplexity at the training length and far past it."""
    ends = [report['runs'][0]['spans'][i]['end'] for i in (0, -1)]
    seeds = len({run['seed'] for run in report['runs']})

    def change(model: str) -> str:
        spans = [run['spans'] for run in report['runs'] if run['model'] == model]
        return 'from {:.2f} to {:.2f}'.format(*(mean(x[i]['perplexity'] for x in spans) for i in (0, -1)))

    return (
        f'- **Texts longer than in training.** Models of two million parameters, trained on {report["block_size"]} bytes at a '
        f'time, are tested on up to {ends[1]}. The perplexity goes {change("Longhorn, exact")} with the exact update, '
        f'{change("Longhorn, diagonal")} with the diagonal one, {change("Mamba-2")} with Mamba-2, {change("DeltaNet")} with '
        f'DeltaNet and {change("attention")} with attention (seeds: {seeds}). '
        '[These](docs/experiments.md#length-extrapolation-lm_2m) and [smaller models, in some of which the diagonal one rises]'
        '(docs/experiments.md#length-extrapolation-lm_families).'
    )


def summary(files: dict[str, Path], timed_on_gpu: bool) -> str:
    """The text between the marks."""
    def read(name: str):
        return json.loads(files[name].read_text())

    missing = ("models of the paper's sizes" if timed_on_gpu else "models on any GPU, and those of the paper's sizes")
    points = extrapolation(read('extrapolation_2M')), memory(read('memory')), passes(read('h200_passes'))
    last = (
        f"Not measured: {missing}. [All results](docs/results.md); [the paper's experiments](docs/experiments.md) at a small "
        "size; the [objectives of the paper's Table 4](docs/objectives.md)."
    )
    lines = [*(fill(point, 127, subsequent_indent='  ', **WHOLE) for point in points), '', fill(last, 127, **WHOLE)]
    return START + '\n'.join(lines) + '\n' + END


def replaced(text: str, drawn: str) -> str:
    """`text` with everything between the marks replaced."""
    return text[:text.index(START)] + drawn + text[text.index(END) + len(END):]
