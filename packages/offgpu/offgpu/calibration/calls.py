"""The call that each published timing is of, with the package at hand that has its kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from offgpu.calibration.points import Point
from offgpu.predict.capture import Pass

MODULES = {
    'chunk_linear_attn': 'linear_attn', 'chunk_simple_gla': 'simple_gla', 'chunk_gla': 'gla', 'chunk_delta_rule': 'delta_rule',
    'fused_recurrent_hgrn': 'hgrn',
}


class OfOneDevice(list):
    """What fla keeps for each device by its number, which tensors without data have none of."""

    def __getitem__(self, index):
        return super().__getitem__(0 if index is None else index)


def operator(module: str, name: str) -> Callable:
    """One of `fla.ops`, which takes the tiles that fit the shared memory of the device that is announced."""
    hardware = importlib.import_module('fla.utils.hardware')
    known = hardware.get_all_max_shared_mem()
    hardware.get_all_max_shared_mem = lambda: OfOneDevice(known)
    return getattr(importlib.import_module(f'fla.ops.{module}'), name)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device='meta').requires_grad_(grad)


def forward_backward(op: Callable, tensors: dict[str, Tensor], others: dict) -> None:
    o = op(**tensors, **others)[0]
    torch.autograd.grad(o, list(tensors.values()), torch.empty_like(o))


def of_fla(point: Point) -> tuple[Pass, int]:
    """As many heads as the shape says, no states, scale D^-0.5; the benchmark of hgrn has heads where rows lie now."""
    B, T, H, D = (point.sizes[x] for x in 'BTHD')
    module, grad = MODULES[point.kernel], point.direction == 'fwd+bwd'

    def prepare(T: int) -> Callable[[], object]:
        op = operator(module, point.kernel)
        if module == 'hgrn':
            return partial(op, **{x: empty(B * H, T, D) for x in 'xg'})
        tensors = {x: empty(B, T, H, D, grad=grad) for x in 'qkv'}
        if module == 'delta_rule':
            tensors['beta'] = empty(B, T, H, grad=grad)
        elif module != 'linear_attn':
            tensors['g'] = empty(B, T, H, *([D] if module == 'gla' else []), grad=grad)
        others = dict(normalize=False) if module == 'linear_attn' else {}
        return partial(forward_backward, op, tensors, others) if grad else partial(op, **tensors, **others)
    return prepare, T


def state_update(point: Point) -> tuple[Pass, int]:
    """The kernel alone, with the launch parameters that the source states, and as many heads as its benchmark has at most.

    Twice: the second finds its tensors in L2, as in the source's CUDA graph.
    """
    sizes = point.sizes

    def prepare(EB: int) -> Callable[[], object]:
        module = importlib.import_module('vllm.model_executor.layers.mamba.ops.mamba_ssm')
        heads, dim, N, groups = min(EB, 128), sizes['headdim'], sizes['dstate'], sizes['ngroups']
        batch = EB // heads
        state, A = empty(batch, heads, dim, N, dtype=torch.float16), empty(heads, dim, N, dtype=torch.float32)
        x, dt, out = (empty(batch, heads, dim) for _ in range(3))
        B, C, D, bias = empty(batch, groups, N), empty(batch, groups, N), empty(heads, dim), empty(heads, dim)
        strides = [n for a in (state, x, dt, bias, A, B, C, D) for n in a.stride()] + [0] * 3 + [*out.stride()] + [0] * 4
        call = partial(
            module._selective_scan_update_kernel[(dim // sizes['BLOCK_M'], batch, heads)], state, None, x, dt, bias, A, B, C,
            D, None, out, None, None, -1, None, None, batch, heads, dim, N, heads // groups, *strides, True, False,
            sizes['BLOCK_M'], USE_RS_ROUNDING=False, PHILOX_ROUNDS=0, num_warps=sizes['warps'],
        )
        return lambda: (call(), call())
    return prepare, sizes['EB']


def times_alone(point: Point) -> bool:
    """Whether the last kernel alone was timed, in a CUDA graph: `state_update`."""
    return point.direction == 'decode'


def call_of(point: Point) -> tuple[Pass, int]:
    """The pass, and the number of its tokens."""
    return (state_update if times_alone(point) else of_fla)(point)


def package_of(point: Point) -> str | None:
    """The package and version whose kernels are compiled for a point; None where it is not installed."""
    name = 'vllm' if times_alone(point) else 'flash-linear-attention'
    try:
        return f'{name} {version(name)}'
    except PackageNotFoundError:
        return None
