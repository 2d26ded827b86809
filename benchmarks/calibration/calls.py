"""The call that each published timing is of, with the package at hand that has its kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from benchmarks.calibration.points import Point
from benchmarks.operators import operator
from offgpu.predict.capture import Pass

# which package has the kernels of a point; mamba's backward kernel is of a shape that its thread does not state
PACKAGES = {
    'chunk_linear_attn': 'flash-linear-attention', 'chunk_simple_gla': 'flash-linear-attention',
    'chunk_gla': 'flash-linear-attention', 'chunk_delta_rule': 'flash-linear-attention',
    'chunk_hgrn': 'flash-linear-attention', 'fused_recurrent_hgrn': 'flash-linear-attention',
    'layer_norm': 'liger-kernel', 'rms_norm': 'liger-kernel', 'cross_entropy': 'liger-kernel',
    '_selective_scan_update_kernel (SSU)': 'vllm',
}
# seconds of a call in which the host keeps the GPU waiting, by its smallest timing: Liger 0.2.1 reads back how many labels
# count (0.53 ms for 4096 columns, 0.37 of them the kernel's); autograd (0.12 ms for rows of 1024, 0.02 of them the kernel's)
HOST_SECONDS = {('cross_entropy', 'fwd'): 1.6e-4, ('layer_norm', 'bwd'): 1e-4}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device='meta').requires_grad_(grad)


def forward_backward(op: Callable, tensors: dict[str, Tensor], accumulated: bool, others: dict) -> None:
    """A pass as it was timed: gradients are new ones or, `accumulated`, added to those of the pass before."""
    o = op(**tensors, **others)[0]
    gradients = torch.autograd.grad(o, list(tensors.values()), torch.empty_like(o))
    if accumulated:
        for x in gradients:
            torch.empty_like(x).add_(x)


def chunks(point: Point) -> tuple[Pass, int]:
    """fla's operators: as many heads as the shape says, no states, scale D^-0.5."""
    module = {'chunk_linear_attn': 'linear_attn', 'chunk_simple_gla': 'simple_gla', 'chunk_gla': 'gla'}.get(
        point.kernel, 'delta_rule',
    )
    B, T, H, D = (point.sizes[x] for x in 'BTHD')
    grad = point.direction == 'fwd+bwd'

    def prepare(T: int) -> Callable[[], object]:
        op = operator(module, point.kernel)
        tensors = {x: empty(B, T, H, D, grad=grad) for x in 'qkv'}
        if module == 'delta_rule':
            tensors['beta'] = empty(B, T, H, grad=grad)
        elif module != 'linear_attn':
            tensors['g'] = empty(B, T, H, *([D] if module == 'gla' else []), grad=grad)
        others = dict(normalize=False) if module == 'linear_attn' else {}
        return partial(forward_backward, op, tensors, False, others) if grad else partial(op, **tensors, **others)
    return prepare, T


def hgrn(point: Point) -> tuple[Pass, int]:
    """The benchmark of 402edec6, whose heads lie where rows do now; its gradients accumulate."""
    B, T, H, D = (point.sizes[x] for x in 'BTHD')
    grad = point.direction == 'fwd+bwd'

    def prepare(T: int) -> Callable[[], object]:
        op = operator('hgrn', point.kernel)
        tensors = {x: empty(B * H, T, D, grad=grad) for x in 'xg'}
        return partial(forward_backward, op, tensors, True, {}) if grad else partial(op, **tensors)
    return prepare, T


def layer_norm(point: Point) -> tuple[Pass, int]:
    """The backward is launched here, for its wrapper counts the SMs of real devices alone; with four warps, as in 0.6.0."""
    def prepare(M: int) -> Callable[[], object]:
        op, N = importlib.import_module('liger_kernel.ops.layer_norm'), point.sizes['N']
        x, dx, dy = (empty(M, N, dtype=torch.float32) for _ in range(3))
        w, mean, rstd = (empty(n, dtype=torch.float32) for n in (N, M, M))
        if point.direction == 'fwd':
            return partial(op.layer_norm_forward, x, w, w, 1e-6)
        blocks, (size, _) = torch.cuda.get_device_properties(0).multi_processor_count, op.calculate_settings(N)
        dw, db = (empty(blocks, N, dtype=torch.float32) for _ in range(2))
        strided = [y for a in (mean, rstd, dx, dw, db, dy) for y in (a, a.stride(0))]

        def backward() -> None:
            rows = -(-M // blocks)
            op._layer_norm_backward_kernel[(blocks,)](x, N, w, *strided, M, N, rows_per_program=rows, BLOCK_SIZE=size)
            dw.sum(0)
            db.sum(0)
        return backward
    return prepare, point.sizes['M']


def rms_norm(point: Point) -> tuple[Pass, int]:
    def prepare(M: int) -> Callable[[], object]:
        op, N = importlib.import_module('liger_kernel.ops.rms_norm'), point.sizes['H']
        return partial(op.rms_norm_forward, empty(M, N), empty(N), 1e-6, 0.0, 'llama', None)
    return prepare, point.sizes['M']


def cross_entropy(point: Point) -> tuple[Pass, int]:
    """The kernel alone, with Liger's launch parameters, for its wrapper reads the labels; logits in float32, gradients too."""
    def prepare(M: int) -> Callable[[], object]:
        op, V = importlib.import_module('liger_kernel.ops.cross_entropy'), point.sizes['V']
        logits, labels, loss = empty(M, V, dtype=torch.float32), empty(M, dtype=torch.int64), empty(M, dtype=torch.float32)
        return partial(
            op.liger_cross_entropy_kernel[(M,)], X_ptr=logits, X_stride=V, Y_ptr=labels, Y_stride=1, weight_ptr=None,
            loss_ptr=loss, z_loss_ptr=None, loss_stride=1, token_accuracy_ptr=None, token_accuracy_stride=0, n_cols=V,
            n_non_ignore=M, sum_non_ignore_weight=M, ignore_index=-100, weight_sum=0.0, lse_square_scale=0.0,
            label_smoothing=0.0, reduction='mean', softcap=None, RETURN_Z_LOSS=False, RETURN_TOKEN_ACCURACY=False,
            BLOCK_SIZE=min(op.MAX_FUSED_SIZE, 1 << (V - 1).bit_length()), HAS_WEIGHT=False, HAS_SOFTCAPPING=False,
            HAS_GRADIENTS=True, num_warps=32,
        )
    return prepare, point.sizes['B'] * point.sizes['T']


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


CALLS = {
    'chunk_hgrn': hgrn, 'fused_recurrent_hgrn': hgrn,
    'layer_norm': layer_norm, 'rms_norm': rms_norm, 'cross_entropy': cross_entropy,
    '_selective_scan_update_kernel (SSU)': state_update,
}


def times_alone(point: Point) -> bool:
    """Whether the last kernel alone was timed, in a CUDA graph: `state_update`."""
    return point.direction == 'decode'


def call_of(point: Point) -> tuple[Pass, int]:
    """The pass, and the number of its tokens."""
    return CALLS.get(point.kernel, chunks)(point)


def package_of(point: Point) -> str | None:
    """The package and version whose kernels are compiled for a point; None where none is installed."""
    name = PACKAGES.get(point.kernel)
    try:
        return name and f'{name} {version(name)}'
    except PackageNotFoundError:
        return None
