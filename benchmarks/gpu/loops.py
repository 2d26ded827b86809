"""Nanoseconds of an instruction by the length of its loop, of products in a chain, and the bandwidth of a copy.

Do instructions of a long loop come from beyond a scheduler's own cache (L0)? Then, per instruction, loops of more than about
780 take longer than one of 256, at each number of warps. A product of 16 x 16 and 16 x 8 that adds to the one before it is
one instruction of a tensor core (HMMA): by itself it takes its latency, and beside enough other warps its turn in the pipe.
The simulator has 27 cycles and, with eight warps, 9.6; for products of products, with two conversions, 76 and 17.6.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

# instructions of a loop
SIZES = (256, 512, 768, 832, 896, 1024, 1152, 1536, 2048)
# warps of a block, blocks of a multiprocessor
PLACES = ((1, 4), (1, 8), (1, 16), (8, 1), (8, 2))
# of each warp
INSTRUCTIONS = 400_000
# warps of one scheduler that multiply, after a warp that has the multiprocessor to itself
CHAINS = (1, 2, 4, 8)
PRODUCTS = 20_000
# of a copy: 4 GiB read and 4 written
COPIED = 2**32


@triton.jit(do_not_specialize=['n', 'drift'])
def loop_kernel(out, a, n, drift, N: tl.constexpr, W: tl.constexpr):
    o = tl.program_id(0) * (32 * W) + tl.arange(0, 32 * W)
    x = o.to(tl.float32)
    # programs drift apart by up to a body
    for _ in range(tl.program_id(0) % 61 * drift):
        x = tl.fma(x, a, 1.)
    xs = (x, x + 1, x + 2, x + 3, x + 4, x + 5, x + 6, x + 7)
    for _ in range(n):
        for _ in tl.static_range(N // 8):
            xs = (
                tl.fma(xs[0], a, 1.), tl.fma(xs[1], a, 1.), tl.fma(xs[2], a, 1.), tl.fma(xs[3], a, 1.), tl.fma(xs[4], a, 1.),
                tl.fma(xs[5], a, 1.), tl.fma(xs[6], a, 1.), tl.fma(xs[7], a, 1.),
            )
    tl.store(out + o, xs[0] + xs[1] + xs[2] + xs[3] + xs[4] + xs[5] + xs[6] + xs[7])


@triton.jit(do_not_specialize=['n'])
def chain_kernel(out, x, n, STATE: tl.constexpr, N: tl.constexpr):
    """`n` times `N` products: each adds to the one before or, with `STATE`, takes it as its operand."""
    i, j = tl.arange(0, 16), tl.arange(0, 8)
    b_a = tl.load(x + i[:, None] * 16 + i[None, :])
    b_b = tl.load(x + i[:, None] * 8 + j[None, :])
    b_acc = tl.zeros([16, 8], dtype=tl.float32)
    for _ in range(n):
        for _ in tl.static_range(N):
            if STATE:
                b_b = tl.dot(b_a, b_b).to(tl.bfloat16)
            else:
                b_acc = tl.dot(b_a, b_b, b_acc)
    o = tl.program_id(0) * 128 + i[:, None] * 8 + j[None, :]
    tl.store(out + o, b_acc + b_b)


PLAN = {f'{W} warps a block, {blocks} blocks an SM': (W, blocks) for W, blocks in PLACES}


def items(device: str) -> list[str]:
    return ['copy', 'products that add up', 'products of products', *PLAN]


def milliseconds(call, device: str) -> float:
    call()
    return 0.0 if device == 'meta' else triton.testing.do_bench(call, warmup=5, rep=20, return_mode='median')


def run(item: str, device: str) -> Iterator[dict]:
    if item == 'copy':
        x, y = (torch.empty(COPIED if device != 'meta' else 1, dtype=torch.uint8, device=device) for _ in range(2))
        x.random_()
        ms = milliseconds(lambda: y.copy_(x), device)
        yield {'ms': ms, 'TB_per_s': 2 * x.nbytes / ms / 1e9 if ms else None}
        return
    count = 132 if device == 'meta' else torch.cuda.get_device_properties(device).multi_processor_count
    if item in PLAN:
        yield from lengths(*PLAN[item], device, count)
    else:
        yield from chains(item == 'products of products', device, count)


def chains(state: bool, device: str, count: int, N: int = 32) -> Iterator[dict]:
    """One warp alone on each of `count` multiprocessors, then one and more for each of its four schedulers."""
    x = torch.zeros(256, dtype=torch.bfloat16, device=device)
    for warps in (0.25, *CHAINS):
        blocks = round(count * 4 * warps)
        out = torch.empty(blocks * 128, dtype=torch.float32, device=device)

        def call(blocks: int = blocks, out: torch.Tensor = out) -> None:
            chain_kernel[(blocks,)](out, x, PRODUCTS // N, STATE=state, N=N, num_warps=1)

        ms = milliseconds(call, device)
        yield {'warps of a scheduler': warps, 'ns': 1e6 * ms / PRODUCTS, 'ns of the pipe': 1e6 * ms / PRODUCTS / max(warps, 1)}


def lengths(W: int, blocks: int, device: str, count: int) -> Iterator[dict]:
    short = None
    for N in SIZES:
        out = torch.empty(count * blocks * 32 * W, device=device)

        def call(N: int = N, out: torch.Tensor = out) -> None:
            loop_kernel[(count * blocks,)](out, 0.5, INSTRUCTIONS // N, 4, N=N, W=W, num_warps=W)

        # a scheduler has a quarter of a multiprocessor's warps, and issues one instruction at a time
        ns = 1e6 * milliseconds(call, device) / (INSTRUCTIONS // N * N * W * blocks / 4)
        short = short or ns
        yield {'loop': N, 'ns': ns, 'of a loop of 256': ns / short if short else None}
