"""The part of the README that `python -m benchmarks report` writes from the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from textwrap import fill

START, END = '<!-- drawn by python -m benchmarks report -->\n', '<!-- to here -->\n'
# do not break links
WHOLE = {'break_long_words': False, 'break_on_hyphens': False}


def operators(report: dict) -> str:
    """Forward and backward at the paper's 120M shape."""
    found = [row for row in report['rows'] if row['set'] == 'paper' and row['V'] == 1536 and row['status'] == 'ok']
    times = {(row['operator'], row['backend']): row['forward_backward'] for row in found}

    def against(name: str, backend: str) -> str:
        figures = times[name, backend]
        return f'{figures["ms"]:.1f} ms, {figures["of_longhorn"]:.1f} times as long'

    machine = report['machine']
    return (
        f'- **Speed on a CPU.** Forward and backward of `chunk_longhorn` (diagonal) take '
        f'{times["chunk_longhorn", "numba"]["ms"]:.1f} ms at '
        f"the paper's 120M width ({machine['device'].removeprefix('CPU ').strip('()')}, {machine['threads']} threads, "
        f"{report['dtype']}, {found[0]['T']} tokens). transformers' Mamba-2 scan in PyTorch takes "
        f'{against("mamba2_chunk_scan", "transformers")}. [All operators](docs/results.md#operators-on-a-cpu).'
    )


def training(report: dict) -> str:
    """A small model beside a transformer."""
    rows = {row['model']: row for row in report['rows'] if row['status'] == 'ok'}
    rate = {name: rows[name]['training']['tokens_per_s'] for name in ('Longhorn', 'Llama')}

    def token_ms(name: str) -> float:
        return next(x for x in rows[name]['generation'] if (x['batch'], x['prompt']) == (1, 8192))['token']['ms']

    return (
        f'- **A small model on a CPU.** Longhorn trains {1 - rate["Longhorn"] / rate["Llama"]:.0%} slower than transformers\' '
        f'Llama ({rate["Longhorn"]:,.0f} and {rate["Llama"]:,.0f} tokens a second, {report["size"]["seq_len"]} tokens a row, '
        f'{report["machine"]["threads"]} threads). Generating one token after a prompt of 8,192 takes '
        f'{token_ms("Longhorn"):.1f} ms; Llama takes {token_ms("Llama"):.1f} ms. '
        '[All models](docs/results.md#models-on-a-cpu).'
    )


def memory(report: dict) -> str:
    """A layer in training, beside those of the same width."""
    kept = {row['layer']: row['kept'] for row in report['rows']}
    own, mamba = kept['Longhorn'], kept['Mamba, by its source']
    return (
        f'- **Memory in training.** For backward, a Longhorn layer of either form saves {own:.0f} bytes per token and unit of '
        f"model width (counted, bfloat16). Mamba's fused block saves {mamba:.0f}, fla's GLA {kept['GLA']:.0f}, DeltaNet "
        f"{kept['DeltaNet']:.0f} and KDA {kept['KDA']:.0f}, softmax attention {kept['softmax attention']:.0f}. "
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

    missing = ("models of the paper's sizes" if timed_on_gpu else "times on any GPU, and models of the paper's sizes")
    points = (
        extrapolation(read('extrapolation_2M')), memory(read('memory')),
        operators(read('cpu_ops')), training(read('cpu_model')),
    )
    last = (
        f"Not measured: {missing}. [All results](docs/results.md); [the paper's experiments](docs/experiments.md) at a small "
        "size; the [objectives of the paper's Table 4](docs/objectives.md)."
    )
    lines = [*(fill(point, 127, subsequent_indent='  ', **WHOLE) for point in points), '', fill(last, 127, **WHOLE)]
    return START + '\n'.join(lines) + '\n' + END


def replaced(text: str, drawn: str) -> str:
    """`text` with everything between the marks replaced."""
    return text[:text.index(START)] + drawn + text[text.index(END) + len(END):]
