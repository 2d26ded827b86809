"""The emulator itself: small kernels come out as PyTorch gives them, and wrong ones are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from offgpu.emulator import Emulator, Launch, formats


@triton.jit
def add_kernel(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def softmax_kernel(x, o, n, B: tl.constexpr):
    i = tl.program_id(0)
    j = tl.arange(0, B)
    a = tl.load(x + i * n + j, mask=j < n, other=-float('inf')).to(tl.float32)
    e = tl.exp(a - tl.max(a, 0))
    tl.store(o + i * n + j, (e / tl.sum(e, 0)).to(o.dtype.element_ty), mask=j < n)


@triton.jit
def matmul_kernel(a, b, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B: tl.constexpr, DOT: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, B)
    c = tl.zeros([M, N], dtype=tl.float32)
    for s in range(0, K, B):
        x, y = tl.load(a + i[:, None] * K + s + k[None, :]), tl.load(b + (s + k)[:, None] * N + j[None, :])
        c = tl.dot(x, y, acc=c, input_precision=DOT)
    tl.store(o + i[:, None] * N + j[None, :], c)


@triton.jit
def operands_kernel(
    a, b, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TA: tl.constexpr, TB: tl.constexpr, REGISTERS: tl.constexpr,
):
    """A product of operands in either order; with REGISTERS the first one is not in shared memory."""
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.trans(tl.load(a + k[:, None] * M + i[None, :])) if TA else tl.load(a + i[:, None] * K + k[None, :])
    y = tl.trans(tl.load(b + j[:, None] * K + k[None, :])) if TB else tl.load(b + k[:, None] * N + j[None, :])
    if REGISTERS:
        x = (x.to(tl.float32) * 2).to(x.dtype)
    tl.store(o + i[:, None] * N + j[None, :], tl.dot(x, y))


@triton.jit
def transpose_kernel(x, o, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    y = tl.trans(tl.load(x + i[:, None] * N + j[None, :]))
    tl.store(o + j[:, None] * M + i[None, :], y)


@triton.jit
def column_sum_kernel(x, o, n, N: tl.constexpr, B: tl.constexpr):
    i, j = tl.arange(0, B), tl.arange(0, N)
    s = tl.zeros([N], dtype=tl.float32)
    for k in range(0, n, B):
        s += tl.sum(tl.load(x + (k + i)[:, None] * N + j[None, :], mask=(k + i < n)[:, None], other=0.), 0)
    tl.store(o + j, s)


@triton.jit
def racy_kernel(x, o, N: tl.constexpr):
    """Through global memory without a barrier: other threads read what one wrote."""
    j = tl.arange(0, N)
    tl.store(o + j, tl.load(x + j) * 2)
    tl.store(x + j, tl.load(o + N - 1 - j))


@triton.jit
def stray_kernel(x, o, N: tl.constexpr):
    j = tl.arange(0, N)
    tl.store(o + j, tl.load(x + j + 1))


@triton.jit
def unmasked_kernel(x, o, n, N: tl.constexpr):
    """Stores beyond the n elements that o has of a larger storage."""
    j = tl.arange(0, N)
    tl.store(o + j, tl.load(x + j, mask=j < n, other=0.))


@triton.jit
def clash_kernel(x, o, N: tl.constexpr):
    """Every block writes the same elements."""
    j = tl.arange(0, N)
    tl.store(o + j, tl.load(x + tl.program_id(0) * N + j))


@triton.jit
def chained_kernel(a, b, c, o, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """(a b)^T c: the result of a product, transposed, as the first operand of the next."""
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.dot(tl.load(a + i[:, None] * K + k[None, :]), tl.load(b + k[:, None] * M + i[None, :]))
    y = tl.load(c + i[:, None] * N + j[None, :])
    tl.store(o + i[:, None] * N + j[None, :], tl.dot(tl.trans(x.to(y.dtype)), y))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def add(n: int, warps: int) -> tuple[Tensor, Tensor]:
    x, y, o = randn(n), randn(n + 1)[1:].contiguous(), torch.empty(n)
    add_kernel[(triton.cdiv(n, 256),)](x, y, o, n, B=256, num_warps=warps)
    return o, x + y


def softmax(n: int, dtype: torch.dtype, warps: int) -> tuple[Tensor, Tensor]:
    x, o = randn(3, n, dtype=dtype), torch.empty(3, n, dtype=dtype)
    softmax_kernel[(3,)](x, o, n, B=triton.next_power_of_2(n), num_warps=warps)
    return o, x.double().softmax(1)


def cut(x: Tensor) -> Tensor:
    """In float64, what a tensor core takes of it."""
    return ((x.contiguous().view(torch.int32) & -8192).view(F32) if x.dtype == F32 else x).double()


def matmul(M: int, N: int, K: int, dtype: torch.dtype, precision: str, warps: int) -> tuple[Tensor, Tensor]:
    a, b, o = randn(M, K, dtype=dtype), randn(K, N, dtype=dtype), torch.empty(M, N)
    matmul_kernel[(1,)](a, b, o, M=M, N=N, K=K, B=32, DOT=precision, num_warps=warps)
    return o, cut(a) @ cut(b) if precision == 'tf32' else a.double() @ b.double()


def operands(
    M: int, N: int, K: int, dtype: torch.dtype, transposed: tuple[bool, bool], registers: bool, warps: int,
) -> tuple[Tensor, Tensor]:
    ta, tb = transposed
    a, b = randn(*((K, M) if ta else (M, K)), dtype=dtype), randn(*((N, K) if tb else (K, N)), dtype=dtype)
    o = torch.empty(M, N)
    operands_kernel[(1,)](a, b, o, M=M, N=N, K=K, TA=ta, TB=tb, REGISTERS=registers, num_warps=warps)
    a, b = a.T if ta else a, b.T if tb else b
    return o, cut(a) @ cut(b) * (2 if registers else 1)


def chained(M: int, N: int, K: int, dtype: torch.dtype, warps: int) -> tuple[Tensor, Tensor]:
    a, b, c, o = randn(M, K, dtype=dtype), randn(K, M, dtype=dtype), randn(M, N, dtype=dtype), torch.empty(M, N)
    chained_kernel[(1,)](a, b, c, o, M=M, N=N, K=K, num_warps=warps)
    return o, (cut(a) @ cut(b)).to(dtype).double().T @ c.double()


def transpose(M: int, N: int, dtype: torch.dtype, warps: int) -> tuple[Tensor, Tensor]:
    x, o = randn(M, N, dtype=dtype), torch.empty(N, M, dtype=dtype)
    transpose_kernel[(1,)](x, o, M=M, N=N, num_warps=warps)
    return o, x.T


def column_sum(n: int, warps: int) -> tuple[Tensor, Tensor]:
    x, o = randn(n, 32), torch.empty(32)
    column_sum_kernel[(1,)](x, o, n, N=32, B=64, num_warps=warps)
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


def check(make: Callable, arguments: tuple, target: str = 'sm_90', order: str = 'together') -> None:
    emulator = Emulator(target, order)
    with emulator.active():
        result, want = make(*arguments)
    assert not emulator.findings.entries
    # the nearest of a 16-bit format, or float32's error in a sum
    bound = {F32: 2e-6, BF16: 4e-3, F16: 5e-4}[result.dtype]
    assert (result.double() - want.double()).norm() <= bound * want.double().norm()


@pytest.mark.parametrize(('make', 'arguments'), [
    pytest.param(make, arguments, id=f'{make.__name__}{arguments}') for make, rows in RIGHT for arguments in rows
])
def test_small_kernels(make, arguments):
    check(make, arguments)


def race(warps: int) -> None:
    racy_kernel[(1,)](randn(256), torch.empty(256), N=256, num_warps=warps)


def unwritten() -> None:
    x = torch.empty(128)
    add_kernel[(1,)](x, x, torch.empty(128), 128, B=256, num_warps=1)


# a launch, and the kind of what must be found, and nothing else
WRONG: dict[str, tuple[Callable[[], None], str]] = {
    'a race between warps': (lambda: race(4), 'race between warps: read after write'),
    'a race in a warp': (lambda: race(1), 'intra-warp: read after write without a sync'),
    'a race between blocks': (
        lambda: clash_kernel[(2,)](randn(256), torch.empty(128), N=128, num_warps=1),
        'race between blocks: two writes',
    ),
    'a load out of bounds': (
        lambda: stray_kernel[(1,)](randn(128), torch.empty(128), N=128, num_warps=1), 'out of bounds',
    ),
    'a store without its mask': (
        lambda: unmasked_kernel[(1,)](randn(100), torch.empty(128)[:100], 100, N=128, num_warps=1),
        'inside the storage, outside of the tensor',
    ),
    'a load of what nobody wrote': (unwritten, 'uninitialised read'),
}

@pytest.mark.parametrize('name', WRONG)
def test_what_is_wrong_is_found(name):
    launch, kind = WRONG[name]
    emulator = Emulator('sm_90', 'together')
    with emulator.active():
        launch()
    assert {x.kind for x in emulator.findings} == {kind}


@pytest.mark.parametrize('bits', [32, 64])
@pytest.mark.parametrize(('position', 'length'), [(0, 5), (3, 7), (0, 59), (20, 60), (31, 1), (4, 0)])
def test_bit_fields(bits, position, length):
    """Those of two's complement: as many bits as the word has from this position on, the last one a sign."""
    a = [0, 1, 2 ** bits - 1, 2 ** (bits - 1), 0x5a5a5a5a5a5a5a5a % 2 ** bits, 0x8000000180000001 % 2 ** bits]
    width = min(length, bits - position)
    fields = [(x >> position) % 2 ** width for x in a]
    words = np.array(a, np.uint32 if bits == 32 else np.uint64)
    assert formats.bit_field(words, position, length, False).tolist() == fields
    signed = [(x - 2 ** width if width and x >> (width - 1) else x) % 2 ** bits for x in fields]
    assert formats.bit_field(words, position, length, True).tolist() == signed


COPIES = (matmul, (32, 64, 64, BF16, 'tf32', 4))
GROUPS = (operands, (64, 64, 64, BF16, (False, True), False, 4))


@pytest.mark.parametrize('order', ['first', 'last'])
@pytest.mark.parametrize('kernel', [COPIES, (column_sum, (200, 4))])
def test_orders_of_warps(kernel, order):
    check(*kernel, order=order)


@pytest.mark.parametrize('kernel', [COPIES, (softmax, (1000, F32, 4))])
def test_ampere(kernel):
    check(*kernel, target='sm_80')


@dataclass
class Without(Emulator):
    """Leaves the lines with this text out."""

    text: str = ''

    def launch(self, launch: Launch) -> None:
        lines = launch.ptx.splitlines()
        kept = [line for line in lines if self.text not in line]
        assert len(kept) < len(lines)
        super().launch(replace(launch, ptx='\n'.join(kept)))


@pytest.mark.parametrize(('kernel', 'target', 'text', 'kind'), [
    (GROUPS, 'sm_90', 'fence.proxy.async', 'wgmma reads a store without a proxy fence between'),
    (GROUPS, 'sm_90', 'wgmma.wait_group', 'a register of wgmma is used before the wait'),
    (COPIES, 'sm_80', 'bar.sync', 'race between warps: read after write'),
    (COPIES, 'sm_80', 'cp.async.wait', 'cp.async never waited for'),
])
def test_missing_waits(kernel, target, text, kind):
    emulator = Without(target, text=text)
    make, arguments = kernel
    with emulator.active():
        make(*arguments)
    assert kind in {x.kind for x in emulator.findings}
