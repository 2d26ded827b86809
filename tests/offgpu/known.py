"""The emulator on small kernels: what each must give by PyTorch, and what must be found wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from offgpu.emulator import Emulator
from tests.offgpu import kernels

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def add(n: int, warps: int) -> tuple[Tensor, Tensor]:
    x, y, o = randn(n), randn(n + 1)[1:].contiguous(), torch.empty(n)
    kernels.add_kernel[(triton.cdiv(n, 256),)](x, y, o, n, B=256, num_warps=warps)
    return o, x + y


def softmax(n: int, dtype: torch.dtype, warps: int) -> tuple[Tensor, Tensor]:
    x, o = randn(3, n, dtype=dtype), torch.empty(3, n, dtype=dtype)
    kernels.softmax_kernel[(3,)](x, o, n, B=triton.next_power_of_2(n), num_warps=warps)
    return o, x.double().softmax(1)


def cut(x: Tensor) -> Tensor:
    """In float64, what a tensor core takes of it."""
    return ((x.contiguous().view(torch.int32) & -8192).view(F32) if x.dtype == F32 else x).double()


def matmul(M: int, N: int, K: int, dtype: torch.dtype, precision: str, warps: int) -> tuple[Tensor, Tensor]:
    a, b, o = randn(M, K, dtype=dtype), randn(K, N, dtype=dtype), torch.empty(M, N)
    kernels.matmul_kernel[(1,)](a, b, o, M=M, N=N, K=K, B=32, DOT=precision, num_warps=warps)
    return o, cut(a) @ cut(b) if precision == 'tf32' else a.double() @ b.double()


def operands(
    M: int, N: int, K: int, dtype: torch.dtype, transposed: tuple[bool, bool], registers: bool, warps: int,
) -> tuple[Tensor, Tensor]:
    ta, tb = transposed
    a, b = randn(*((K, M) if ta else (M, K)), dtype=dtype), randn(*((N, K) if tb else (K, N)), dtype=dtype)
    o = torch.empty(M, N)
    kernels.operands_kernel[(1,)](a, b, o, M=M, N=N, K=K, TA=ta, TB=tb, REGISTERS=registers, num_warps=warps)
    a, b = a.T if ta else a, b.T if tb else b
    return o, cut(a) @ cut(b) * (2 if registers else 1)


def chained(M: int, N: int, K: int, dtype: torch.dtype, warps: int) -> tuple[Tensor, Tensor]:
    a, b, c, o = randn(M, K, dtype=dtype), randn(K, M, dtype=dtype), randn(M, N, dtype=dtype), torch.empty(M, N)
    kernels.chained_kernel[(1,)](a, b, c, o, M=M, N=N, K=K, num_warps=warps)
    return o, (cut(a) @ cut(b)).to(dtype).double().T @ c.double()


def transpose(M: int, N: int, dtype: torch.dtype, warps: int) -> tuple[Tensor, Tensor]:
    x, o = randn(M, N, dtype=dtype), torch.empty(N, M, dtype=dtype)
    kernels.transpose_kernel[(1,)](x, o, M=M, N=N, num_warps=warps)
    return o, x.T


def column_sum(n: int, warps: int) -> tuple[Tensor, Tensor]:
    x, o = randn(n, 32), torch.empty(32)
    kernels.column_sum_kernel[(1,)](x, o, n, N=32, B=64, num_warps=warps)
    return o, x.double().sum(0)


# on sm_90 the operands of four and eight warps go through wgmma
RIGHT: list[tuple[Callable, list[tuple]]] = [
    (add, [(1000, 1), (1000, 4), (77, 2)]),
    (softmax, [(100, F32, 1), (1000, F32, 4), (300, BF16, 2), (130, F16, 4)]),
    (matmul, [
        (16, 16, 32, BF16, 'tf32', 1), (32, 16, 64, BF16, 'tf32', 2), (32, 64, 64, BF16, 'tf32', 4),
        (32, 32, 64, F16, 'tf32', 4), (16, 16, 32, F32, 'tf32', 1), (32, 32, 64, F32, 'tf32', 2),
        (32, 64, 64, F32, 'tf32', 4), (32, 32, 64, F32, 'ieee', 2), (16, 32, 32, F32, 'tf32x3', 1),
    ]),
    (operands, [
        (64, 16, 16, BF16, (False, False), False, 4), (64, 16, 32, BF16, (False, True), True, 4),
        (64, 64, 64, BF16, (False, True), False, 4), (64, 64, 64, BF16, (True, False), False, 4),
        (128, 32, 64, F16, (True, True), False, 4), (128, 64, 128, BF16, (True, False), False, 8),
        (256, 16, 16, BF16, (False, False), True, 8), (64, 16, 32, F32, (False, True), False, 4),
        (64, 128, 32, F32, (False, True), False, 4),
    ]),
    # flash-linear-attention's issues 640 and 984
    (chained, [(64, 64, 64, BF16, 4), (64, 64, 32, F16, 4), (32, 64, 32, BF16, 2)]),
    (transpose, [(32, 64, F32, 1), (64, 32, BF16, 4), (16, 128, F16, 2)]),
    (column_sum, [(100, 1), (200, 4), (64, 2)]),
]


def race(warps: int) -> None:
    kernels.racy_kernel[(1,)](randn(256), torch.empty(256), N=256, num_warps=warps)


def unwritten() -> None:
    x = torch.empty(128)
    kernels.add_kernel[(1,)](x, x, torch.empty(128), 128, B=256, num_warps=1)


# (launch, the kind of what must be found, and nothing else)
WRONG: dict[str, tuple[Callable[[], None], str]] = {
    'a race between warps': (partial(race, 4), 'race between warps: read after write'),
    'a race in a warp': (partial(race, 1), 'intra-warp: read after write without a sync'),
    'a race between blocks': (
        lambda: kernels.clash_kernel[(2,)](randn(256), torch.empty(128), N=128, num_warps=1),
        'race between blocks: two writes',
    ),
    'a load out of bounds': (
        lambda: kernels.stray_kernel[(1,)](randn(128), torch.empty(128), N=128, num_warps=1), 'out of bounds',
    ),
    'a store without its mask': (
        lambda: kernels.unmasked_kernel[(1,)](randn(100), torch.empty(128)[:100], 100, N=128, num_warps=1),
        'inside the storage, outside of the tensor',
    ),
    'a load of what nobody wrote': (unwritten, 'uninitialised read'),
}

KERNELS: dict[str, Callable] = {
    **{
        f'{make.__name__}{arguments}'.replace('torch.', ''): partial(make, *arguments)
        for make, rows in RIGHT for arguments in rows
    },
    **{name: launch for name, (launch, _) in WRONG.items()},
}


def check(name: str, target: str, order: str) -> str:
    """What is wrong with the emulator's run of one kernel; empty where nothing is."""
    emulator = Emulator(target, order)
    with emulator.active():
        result = KERNELS[name]()
    kinds = {x.kind for x in emulator.findings}
    expected = {WRONG[name][1]} if name in WRONG else set()
    if kinds != expected:
        return f'found {sorted(kinds)}, not {sorted(expected)}'
    if name in WRONG:
        return ''
    got, want = (x.double() for x in result)
    # the nearest of a 16-bit format, or float32's error in a sum
    bound = {F32: 2e-6, BF16: 4e-3, F16: 5e-4}[result[0].dtype]
    error = ((got - want).norm() / want.norm()).item()
    return '' if error <= bound else f'differs by {error:.1e}'
