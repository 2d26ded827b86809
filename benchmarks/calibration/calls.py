"""The call that each published timing is of, with the package at hand that has its kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from benchmarks.calibration.points import Point
from offgpu.predict.capture import Pass

# which package has the kernels of a point; mamba's backward kernel is of a shape that its thread does not state
PACKAGES = {
    'chunk_linear_attn': 'flash-linear-attention', 'chunk_simple_gla': 'flash-linear-attention',
    'chunk_gla': 'flash-linear-attention', 'chunk_delta_rule': 'flash-linear-attention',
    'chunk_hgrn': 'flash-linear-attention', 'fused_recurrent_hgrn': 'flash-linear-attention',
    'layer_norm': 'liger-kernel', 'rms_norm': 'liger-kernel', 'cross_entropy': 'liger-kernel',
    '_selective_scan_update_kernel (SSU)': 'vllm',
}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device='meta').requires_grad_(grad)


def forward_backward(op: Callable, tensors: dict[str, Tensor], accumulated: bool, others: dict) -> None:
    """A pass as it was timed: gradients are new ones or, `accumulated`, added to those of the pass before."""
    o = op(**tensors, **others)[0]
    gradients = torch.autograd.grad(o, list(tensors.values()), torch.empty_like(o))
    if accumulated:
        for x in gradients:
            torch.empty_like(x).add_(x)


def operator(point: Point) -> tuple[Pass, int]:
    """fla's operators: as many heads as the shape says, no states, scale D^-0.5."""
    module, name = {
        'chunk_linear_attn': 'linear_attn', 'chunk_simple_gla': 'simple_gla', 'chunk_gla': 'gla',
        'chunk_delta_rule': 'delta_rule', 'chunk_hgrn': 'hgrn', 'fused_recurrent_hgrn': 'hgrn',
    }[point.kernel], point.kernel
    B, T, H, D = (point.sizes[x] for x in 'BTHD')
    grad = point.direction == 'fwd+bwd'

    def prepare(T: int) -> Callable[[], object]:
        op = getattr(importlib.import_module(f'fla.ops.{module}'), name)
        if module == 'hgrn':
            # 402edec6 had heads where rows are now; its benchmark lets gradients accumulate
            tensors = {x: empty(B * H, T, D, grad=grad) for x in 'xg'}
        else:
            tensors = {x: empty(B, T, H, D, grad=grad) for x in 'qkv'}
            tensors |= {
                'chunk_linear_attn': dict, 'chunk_simple_gla': lambda: dict(g=empty(B, T, H, grad=grad)),
                'chunk_gla': lambda: dict(g=empty(B, T, H, D, grad=grad)),
                'chunk_delta_rule': lambda: dict(beta=empty(B, T, H, grad=grad)),
            }[name]()
        others = dict(normalize=False) if name == 'chunk_linear_attn' else {}
        return partial(forward_backward, op, tensors, module == 'hgrn', others) if grad else partial(op, **tensors, **others)
    return prepare, T


def layer_norm(point: Point) -> tuple[Pass, int]:
    def prepare(M: int) -> Callable[[], object]:
        op, N = importlib.import_module('liger_kernel.ops.layer_norm'), point.sizes['N']
        x, w, statistics = (empty(*shape, dtype=torch.float32) for shape in ((M, N), (N,), (M,)))
        if point.direction == 'fwd':
            return partial(op.layer_norm_forward, x, w, w, 1e-6)
        return partial(op.layer_norm_backward, torch.empty_like(x), x, w, w, statistics, statistics)
    return prepare, point.sizes['M']


def rms_norm(point: Point) -> tuple[Pass, int]:
    def prepare(M: int) -> Callable[[], object]:
        op, N = importlib.import_module('liger_kernel.ops.rms_norm'), point.sizes['H']
        return partial(op.rms_norm_forward, empty(M, N), empty(N), 1e-6, 0.0, 'llama', None)
    return prepare, point.sizes['M']


def cross_entropy(point: Point) -> tuple[Pass, int]:
    """Logits in float32: what Liger's benchmark draws."""
    def prepare(M: int) -> Callable[[], object]:
        op = importlib.import_module('liger_kernel.ops.cross_entropy')
        logits = empty(M, point.sizes['V'], dtype=torch.float32, grad=True)
        return partial(op.LigerCrossEntropyFunction.apply, logits, empty(M, dtype=torch.int64))
    return prepare, point.sizes['B'] * point.sizes['T']


def state_update(point: Point) -> tuple[Pass, int]:
    """The kernel alone, with the launch parameters that the source states; heads are 8 groups of 8 or fewer."""
    sizes = point.sizes
    heads = min(sizes['EB'], 64)

    def prepare(EB: int) -> Callable[[], object]:
        module = importlib.import_module('vllm.model_executor.layers.mamba.ops.mamba_ssm')
        batch, dim, N, groups = max(EB // heads, 1), sizes['headdim'], sizes['dstate'], sizes['ngroups']
        state, x = empty(batch, heads, dim, N, dtype=torch.float16), empty(batch, heads, dim)
        vector = torch.empty(heads, dtype=torch.float32, device='meta')
        A, dt_bias, D = vector[:, None, None].expand(heads, dim, N), vector[:, None].expand(heads, dim), vector[:, None].expand(heads, dim)
        dt, B = empty(batch, heads)[..., None].expand(batch, heads, dim), empty(batch, groups, N)

        def run() -> None:
            module._selective_scan_update_kernel[(dim // sizes['BLOCK_M'], batch, heads)](
                state, None, x, dt, dt_bias, A, B, torch.empty_like(B), D, None, torch.empty_like(x), None, None, -1, None, None,
                batch, heads, dim, N, heads // groups, *state.stride(), *x.stride(), *dt.stride(), *dt_bias.stride(), *A.stride(),
                *B.stride(), *B.stride(), *D.stride(), 0, 0, 0, *x.stride(), 0, 0, 0, 0, True, True, sizes['BLOCK_M'],
                USE_RS_ROUNDING=False, PHILOX_ROUNDS=0, num_warps=sizes['warps'],
            )
        return run
    return prepare, sizes['EB']


CALLS = {
    'layer_norm': layer_norm, 'rms_norm': rms_norm, 'cross_entropy': cross_entropy,
    '_selective_scan_update_kernel (SSU)': state_update,
}


def call_of(point: Point) -> tuple[Pass, int]:
    """The pass, and the number of its tokens."""
    return CALLS.get(point.kernel, operator)(point)


def package_of(point: Point) -> str | None:
    """The package and version whose kernels are compiled for a point; None where none is installed."""
    name = PACKAGES.get(point.kernel)
    try:
        return name and f'{name} {version(name)}'
    except PackageNotFoundError:
        return None
