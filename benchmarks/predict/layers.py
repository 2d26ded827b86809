"""A training step and a decoded token of a whole layer: all its kernels, predicted.

    python -m benchmarks layers [--model 1.3B ...] [--layer 'Longhorn, exact' ...] [--json FILE]

A block of the paper's models without MLP, eager: norm, layer, residual, in bfloat16. fla's layers have their own defaults,
with heads as in their papers. Kernels by Triton are simulated; matrix products and PyTorch's other kernels take what their
bytes or operations take. `step` is forward and backward of one block; `token` is one of every sequence in a batch, whose
launches follow each other as in a CUDA graph.

Mamba and Mamba-2 need mamba_ssm; a checkout of github.com/state-spaces/mamba on PYTHONPATH is enough. Their convolution is
fla's in place of CUDA's, and Mamba's scan, which is CUDA, takes a lower bound.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

import torch
from fla.layers import DeltaNet, GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention
from fla.models.utils import Cache
from fla.modules import RMSNorm
from torch import nn

from benchmarks.calibration.errors import error_bars
from benchmarks.calibration.tuning import Tuning, predict_tuned
from benchmarks.calibration.walks import KEPT, Walks
from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report
from benchmarks.operators import LonghornKernels
from benchmarks.predict import mamba
from benchmarks.predict.run import CALIBRATION, known_rows
from fla_longhorn.layers import Longhorn
from offgpu.predict.capture import Pass
from offgpu.predict.machine import MACHINES
from offgpu.predict.times import Prediction

LAYERS: dict[str, Callable[[int], nn.Module]] = {
    'Longhorn, diagonal': lambda width: Longhorn(hidden_size=width, layer_idx=0),
    'Longhorn, exact': lambda width: Longhorn(hidden_size=width, exact=True, layer_idx=0),
    'GLA': lambda width: GatedLinearAttention(hidden_size=width, num_heads=max(width // 512, 1), layer_idx=0),
    'DeltaNet': lambda width: DeltaNet(hidden_size=width, num_heads=width // 128, layer_idx=0),
    'Gated DeltaNet': lambda width: GatedDeltaNet(hidden_size=width, num_heads=width * 3 // 4 // 256 or 1, layer_idx=0),
    'KDA': lambda width: KimiDeltaAttention(hidden_size=width, num_heads=width // 128, layer_idx=0),
    'Mamba': lambda width: mamba.Mamba(hidden_size=width, intermediate_size=2 * width, layer_idx=0, backend='triton'),
    'Mamba-2': lambda width: mamba.Mamba2(hidden_size=width, layer_idx=0, backend='triton'),
}
# steps that show what recomputation costs
WITHOUT_RECOMPUTATION = {
    'Longhorn, diagonal, recompute=False': lambda width: Longhorn(hidden_size=width, recompute=False, layer_idx=0),
    'Longhorn, exact, recompute=False': lambda width: Longhorn(hidden_size=width, exact=True, recompute=False, layer_idx=0),
}
# the kernels that are ours, by the names that Triton gives them
OURS = 'longhorn'


@dataclass(frozen=True)
class Model:
    """Width and depth of one of the paper's models, rows and tokens of a training step, sequences that decode together."""

    width: int
    layers: int
    B: int
    T: int
    sequences: int = 8


MODELS = {'120M': Model(768, 24, 64, 2048), '1.3B': Model(2048, 48, 8, 2048)}


class Block(nn.Module):
    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.layer = RMSNorm(width), layer

    def forward(self, x: torch.Tensor, **options) -> torch.Tensor:
        return x + self.layer(self.norm(x), **options)[0]


def block(name: str, width: int) -> Block:
    with torch.device('meta'):
        return Block((LAYERS | WITHOUT_RECOMPUTATION)[name](width), width).bfloat16()


def hidden(B: int, T: int, width: int) -> torch.Tensor:
    return torch.empty(B, T, width, dtype=torch.bfloat16, device='meta')


def step(name: str, model: Model) -> Pass:
    """Forward and backward over `model.B` rows."""
    def prepare(T: int) -> Callable[[], object]:
        module, x = block(name, model.width).train(), hidden(model.B, T, model.width).requires_grad_()
        inputs = [x, *module.parameters()]

        def run() -> object:
            y = module(x)
            # a parameter may be unused
            return torch.autograd.grad(y, inputs, torch.empty_like(y), allow_unused=True)
        return run
    return prepare


def token(name: str, model: Model) -> Pass:
    """One token of each of as many sequences."""
    def prepare(sequences: int) -> Callable[[], object]:
        module, cache = block(name, model.width).eval(), Cache()
        with torch.no_grad():
            module(hidden(sequences, 128, model.width), past_key_values=cache, use_cache=True)
        return torch.no_grad()(partial(module, hidden(sequences, 1, model.width), past_key_values=cache, use_cache=True))
    return prepare


PASSES = {'step': step, 'token': token}


def summary(parts: list[Prediction]) -> dict:
    """Microseconds: in all, of our kernels, of matrix products, of lower bounds; and of each kernel, the largest first."""
    kernels: dict[str, float] = {}
    for p in parts:
        kernels[p.kernel] = kernels.get(p.kernel, 0.0) + p.seconds * 1e6
    products, bounds = (sum(p.seconds for p in parts if what in p.share) for what in ('matrix products', 'lower bound'))
    return {
        'us': round(sum(kernels.values()), 2), 'ours_us': round(sum(x for n, x in kernels.items() if OURS in n), 2),
        'products_us': round(products * 1e6, 2), 'bounds_us': round(bounds * 1e6, 2), 'launches': len(parts),
        'kernels': {n: round(x, 2) for n, x in sorted(kernels.items(), key=lambda item: -item[1])},
    }


def measure(name: str, what: str, model: Model, gpu: str, tuning: Tuning, walks: Walks) -> dict:
    started = time.perf_counter()
    length = model.T if what == 'step' else model.sequences
    with ExitStack() as stack:
        for patch in (LonghornKernels(), *mamba.replaced()):
            stack.enter_context(patch)
        parts = predict_tuned(PASSES[what](name, model), length, MACHINES[gpu](), tuning, walks)
    return summary(parts) | {'seconds': round(time.perf_counter() - started, 1)}


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks layers', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--model', nargs='+', choices=MODELS, default=[*MODELS])
    known = [*LAYERS, *WITHOUT_RECOMPUTATION]
    parser.add_argument('--layer', nargs='+', choices=known, default=known)
    parser.add_argument('--pass', dest='passes', nargs='+', choices=PASSES, default=[*PASSES])
    parser.add_argument('--gpu', default='H100', choices=[name for name in MACHINES if MACHINES[name]().timed])
    parser.add_argument('--json', metavar='FILE', help='file for the rows; its rows of this commit are kept')
    options = parser.parse_args(args)
    report: dict = {'machine': describe_machine()}
    report['rows'] = known_rows(options.json, report)
    report['bars'] = error_bars(json.loads(CALIBRATION.read_text())['rows'])
    if version := mamba.version():
        report['machine']['versions']['mamba-ssm'] = version
    elif left := [name for name in options.layer if name.startswith('Mamba')]:
        print(f'{" and ".join(left)}: left out, there is no mamba_ssm (a checkout on PYTHONPATH is enough)', flush=True)
        options.layer = [name for name in options.layer if name not in left]
    walks, tuning = Walks(KEPT), Tuning(KEPT)
    names = ('gpu', 'model', 'layer', 'pass')
    done = {tuple(row[n] for n in names) for row in report['rows']}
    for key in ((options.gpu, m, n, p) for m in options.model for p in options.passes for n in options.layer):
        if key in done or key[2] in WITHOUT_RECOMPUTATION and key[3] == 'token':
            continue
        gpu, size, name, what = key
        row = dict(zip(names, key, strict=True)) | asdict(MODELS[size])
        row['parameters'] = sum(p.numel() for p in block(name, MODELS[size].width).parameters())
        row |= measure(name, what, MODELS[size], gpu, tuning, walks)
        most = ', '.join(f'{kernel} {us:.1f}' for kernel, us in list(row['kernels'].items())[:6])
        parts = f'ours {row["ours_us"]:.1f}, products {row["products_us"]:.1f}, {row["launches"]} launches'
        print(f'{gpu} {size} {name}, {what}: {row["us"]:.1f} us, {parts}: {most}  ({row["seconds"]} s)', flush=True)
        report['rows'].append(row)
        if options.json:
            write_report(report, options.json)
    return 0
