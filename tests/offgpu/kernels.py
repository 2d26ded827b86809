"""Small kernels with known results, and kernels that are wrong in a known way."""

from __future__ import annotations

import triton
import triton.language as tl


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
