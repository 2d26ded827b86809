"""Launch parameters of the exact update's kernels: one function per kernel.

`capability` is :func:`fla_longhorn.ops.triton.device.device_capability`. Where no other reason is given, the choice has the
least predicted time on an H100 (`python -m benchmarks predict`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from triton.runtime.jit import KernelInterface

from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.common import padded_state_size
from fla_longhorn.ops.triton.device import ASYNC_COPIES

# tokens in a chunk: the substitution takes (CHUNK_SIZE - 1) / 2 FMA per token and channel; 32 rows do not fit in registers
CHUNK_SIZE = 16


@dataclass(frozen=True)
class ExactConfig:
    """Launch parameters of a program with a chunk `[BT, BV]` and a state `[BV, BK]`, held in slices `[BV, BS]`.

    `STAGES` chunks are in flight: with two or more, asynchronous copies load q, k, G and A. `PREFETCH` loads the other inputs
    of the next chunk into registers, and `ROWS` rows of G are loaded before the substitution. `RELOAD` loads k twice instead
    of holding it.
    """

    BK: int
    BV: int
    num_warps: int
    BS: int = 0
    BT: int = CHUNK_SIZE
    STAGES: int = 1
    PREFETCH: bool = False
    RELOAD: bool = False
    ROWS: int = 0
    num_stages: int | None = None

    def __post_init__(self) -> None:
        if self.BS == 0:
            object.__setattr__(self, 'BS', self.BK)
        assert self.BK % self.BS == 0 and self.ROWS < CHUNK_SIZE and 16 <= CHUNK_SIZE <= self.BT

    @property
    def VEC(self) -> int:
        """Columns of a chunk that a thread owns."""
        return max(self.BV // (32 * self.num_warps), 1)

    def of(self, kernel: KernelInterface) -> dict:
        """The launch's keyword arguments: the parameters that the kernel has, and Triton's own."""
        names = {*kernel.arg_names, 'num_warps', 'num_stages'}
        parameters = {name: getattr(self, name) for name in (*(x.name for x in fields(self)), 'VEC') if name in names}
        return {name: x for name, x in parameters.items() if x is not None}


def state_parts(K: int, precision: str) -> int:
    """Parts of the states that products load: two in bfloat16 every 64 tokens move half the bytes of one every 16."""
    return 2 if precision == 'bf16' and padded_state_size(K) == 16 else 1


def span_size(K: int, precision: str) -> int:
    """Tokens between the states that products load, which are also the tokens of one of their programs.

    After K tokens a span's initial state is overwritten: it cancels against the updates, but its rounding error does not. So
    a span is longer than K only where the state is stored in two parts, and shorter where products are unrolled.
    """
    interval = checkpoint_interval(K)
    span = 16 if precision == 'ieee' else min(64, padded_state_size(K) if state_parts(K, precision) == 1 else interval)
    # chunks divide spans, spans divide intervals
    assert span % CHUNK_SIZE == 0 == interval % span
    return span


def state_block(K: int, precision: str, capability: int) -> ExactConfig:
    """Parameters with which the state `[BV, BK]` fits in registers."""
    BK = padded_state_size(K)
    if precision == 'ieee' and BK >= 128:
        # without tensor cores operands are in registers, so threads share columns
        return ExactConfig(BK, 8192 // BK if torch.version.hip else 64, 8)
    if precision == 'tf32' and BK == 128 and capability >= 10:
        # the state and float32 operands of a warp group do not fit in tensor memory
        return ExactConfig(BK, 64, 2)
    if precision == 'bf16' and BK in (64, 128) and capability < 10:
        # one warp needs no synchronisation; from Blackwell on, a warp group holds the state in tensor memory. Slices take
        # fewer registers for operands; those of 32 would have v's shape, and so k's layout. Before Hopper, two stages fit.
        stages = 1 if BK == 64 and not ASYNC_COPIES else 3 if BK == 128 and ASYNC_COPIES and capability == 9 else 2
        return ExactConfig(BK, 32, 1, BS=64, STAGES=stages)
    BV, num_warps = {16: (64, 1), 32: (64, 2), 64: (128, 4), 128: (256, 8), 256: (32, 2)}[BK]
    return ExactConfig(BK, BV, num_warps)


def for_forward(K: int, precision: str, capability: int) -> ExactConfig:
    """At K = 16 a thread owns one column, because with two it has too few registers to prefetch."""
    block = state_block(K, precision, capability)
    if block.BK == 16:
        return replace(block, BV=32, PREFETCH=precision != 'ieee', ROWS=8 if precision == 'bf16' else 0)
    if block.BK == 32:
        return replace(block, PREFETCH=True, ROWS=4 if precision == 'bf16' else 0)
    if block.num_warps == 1:
        # at K = 64 k is reloaded only if D or z need registers, at K = 128 v too; with three stages one program less fits
        return replace(block, RELOAD=True, ROWS=2 if block.BK == 64 else 0, STAGES=min(block.STAGES, 2))
    return block


def for_states(K: int, precision: str, capability: int) -> ExactConfig:
    """The states-only pass of a split forward: more stages, because few warps are resident to hide the latency of copies."""
    config = for_forward(K, precision, capability)
    ahead = ASYNC_COPIES and capability == 9 and precision == 'bf16' and config.num_warps == 1
    return replace(config, STAGES=3) if ahead else config


def for_replay(K: int, precision: str, capability: int) -> ExactConfig:
    """The replay in backward; it prefetches nothing, so one warp has enough registers for K = 32."""
    block = state_block(K, precision, capability)
    if block.BK == 32:
        return replace(block, num_warps=1)
    # at K = 64 registers spill with asynchronous copies
    return replace(block, STAGES=1) if block.BK == 64 else block


def for_backward(K: int, precision: str, capability: int) -> ExactConfig:
    """The state's gradient is in registers, in place of the state."""
    block = state_block(K, precision, capability)
    if block.BK == 64:
        # one warp has too few registers to prefetch
        block = replace(block, BV=128, num_warps=4, BS=64, STAGES=1)
    if precision != 'bf16' or block.BK > 64:
        return block
    # copies of G and A: their loads from L2 would share a scoreboard with the next chunk's, and wait for DRAM
    stages = 2 if block.BK <= 32 and ASYNC_COPIES and capability in (8, 9) else block.STAGES
    BV = 32 if block.BK == 16 else block.BV
    return replace(block, BV=BV, PREFETCH=True, ROWS={16: 6, 32: 4, 64: 0}[block.BK], STAGES=stages)


def for_products(K: int, precision: str, capability: int) -> ExactConfig:
    """Five sums, `[BT, BK]` and `[BT, BT]`, fit in registers, together with operands that are there."""
    BK, BT = min(padded_state_size(K), 64), span_size(K, precision)
    if BK < BT and capability >= 10:
        # from Blackwell on, four warps would hold the sums in tensor memory, and move them for every block of channels
        return ExactConfig(BK, 32, 2, BT=BT)
    # before Hopper, tensor cores read operands from registers only
    in_registers = 0 < capability < 9
    # wider float32 operands do not fit in shared memory
    narrow = precision == 'ieee' or BT == 64 and (in_registers or precision == 'tf32')
    # a warp group reads operands from shared memory, without the fence that Triton up to 3.6 lacks
    stages = 1 if BT == 64 and not in_registers and not ASYNC_COPIES else None
    return ExactConfig(BK, 32 if narrow else 64, max(BK, BT) // 16, BT=BT, num_stages=stages)


def for_recurrent(K: int) -> ExactConfig:
    """A thread owns all K entries of its channels, so that sums over K need no exchange."""
    BK = padded_state_size(K)
    BV, num_warps = {16: (64, 1), 32: (64, 1), 64: (32, 1), 128: (32, 1), 256: (32, 2)}[BK]
    return ExactConfig(BK, BV, num_warps)
