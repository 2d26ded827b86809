"""Launch parameters of the exact update's kernels: one function for the chunkwise ones, one for products, one for decoding.

Where no other reason is given, the choice has the least predicted time on an H100 (`python -m benchmarks predict`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.common import padded_state_size
from fla_longhorn.ops.triton.device import ASYNC_COPIES
from fla_longhorn.ops.triton.exact.common import is_split
from fla_longhorn.ops.triton.launch import LaunchConfig, LaunchKey

# environment variable: with 1, the kernels of `mma` serve no call
GENERAL_KERNELS = 'FLA_LONGHORN_GENERAL_KERNELS'


@dataclass(frozen=True)
class ExactConfig(LaunchConfig):
    """Launch parameters of a program with tiles `[BT, BV]` and `[BT, BK]`, of which a kernel takes those that it has.

    The recurrence has `ROWS` chains of sums and `STAGES` tokens in flight.
    """

    BV: int
    BT: int = 1
    BK: int = 0
    STAGES: int = 1
    ROWS: int = 0

    @property
    def VEC(self) -> int:
        """Columns of a tile that a thread owns."""
        return max(self.BV // (32 * self.num_warps), 1)


def chunk_size(key: LaunchKey) -> int:
    """Tokens in a chunk: with 16, the loops over chunks have 900 to 2,000 instructions, which a card's cache does not hold.

    Without tensor cores 8 would be half of a product's sum; AMD's take no narrower tiles.
    """
    return 16 if key.precision == 'ieee' or key.card.backend == 'hip' else 8


def state_parts(key: LaunchKey, per_channel: bool) -> int:
    """Parts of the states that products load: two in bfloat16 every 64 tokens move half the bytes of one every 16."""
    return 2 if key.precision == 'bf16' and padded_state_size(key.K) == 16 and not per_channel else 1


def span_size(key: LaunchKey, per_channel: bool) -> int:
    """Tokens between the states that products load, which are also the tokens of one of their programs.

    With a decay per channel it is the shortest, because each doubling of a span takes two more products, of operands that have
    decayed to its middle.

    After K tokens a span's initial state is overwritten: it cancels against the updates, but its rounding error does not. So
    a span is longer than K only where the state is stored in two parts, and shorter where products are unrolled.
    """
    interval = checkpoint_interval(key.K)
    longest = padded_state_size(key.K) if state_parts(key, per_channel) == 1 else interval
    span = 16 if key.precision == 'ieee' or per_channel else min(64, longest)
    # a span holds whole chunks, and an interval whole spans
    assert span % chunk_size(key) == 0 == interval % span
    return span


def for_chunks(key: LaunchKey) -> ExactConfig:
    """Programs that hold a state `[BV, K]`: one warp waits for no other, and of 32 channels each thread owns a column."""
    BK, card = padded_state_size(key.K), key.card
    BV, num_warps = 32 if BK <= 64 or BK == 128 and key.precision == 'bf16' else 16, 1
    if key.precision == 'ieee':
        # without tensor cores operands are in registers, so threads share columns
        BV, num_warps = {16: (64, 1), 32: (64, 2), 64: (32, 4) if card.mma else (128, 4), 128: (64, 8), 256: (32, 8)}[BK]
    return ExactConfig(BV, chunk_size(key), num_warps=num_warps)


def has_lanes(key: LaunchKey, g: torch.Tensor | None) -> bool:
    """Whether the kernels of `mma` serve: they are for bfloat16 on CUDA, without a gate or with one per head."""
    served = key.precision == 'bf16' and key.card.backend == 'cuda' and padded_state_size(key.K) <= 128
    if os.environ.get(GENERAL_KERNELS) == '1':
        return False
    return served and (g is None or g.dim() == 3)


def walks_back(args: Arguments, key: LaunchKey) -> bool:
    """Whether backward of updates that are kept starts from the states behind the sequences, in one pass instead of two.

    A state of 64 entries and its gradient do not fit in registers, and a replay is parallel where sequences are few and long.
    """
    if padded_state_size(key.K) > 32 or args.g is not None:
        return False
    B, T, H, K, V = args.sizes
    config = for_lanes(key)
    warps = args.num_sequences * H * triton.cdiv(V, config.BV) * config.num_warps
    return not is_split(warps, T, checkpoint_interval(K), args.q.device)


def for_lanes(key: LaunchKey) -> ExactConfig:
    """Two rows of accumulators to a lane; 16 warps share a multiprocessor's registers, of 128 entries 8 (predicted: 0.6 to 0.8
    times as long, as fewer spill)."""
    return ExactConfig(16, num_warps=1, maxnreg=255 if padded_state_size(key.K) == 128 else 128)


def for_products(key: LaunchKey, per_channel: bool) -> ExactConfig:
    """Five sums, `[BT, BK]` and `[BT, BT]`, fit in registers, together with operands that are there."""
    BT, BK = span_size(key, per_channel), min(padded_state_size(key.K), 64)
    if BK < BT and key.card.tensor_memory:
        # four warps would hold the sums in tensor memory, and move them for every block of channels
        return ExactConfig(32, BT, BK, num_warps=2)
    if per_channel and key.precision != 'ieee':
        # so that its many products make a loop that the card's cache holds
        return ExactConfig(16, BT, BK, num_warps=1)
    # wider float32 operands do not fit in shared memory, nor operands of a warp's products in registers
    narrow = key.precision == 'ieee' or BT == 64 and (key.card.mma or key.precision == 'tf32')
    # a warp group reads operands from shared memory, without the fence that Triton up to 3.6 lacks
    stages = 1 if BT == 64 and not key.card.mma and not ASYNC_COPIES else None
    return ExactConfig(32 if narrow else 64, BT, BK, num_warps=max(BK, BT) // 16, num_stages=stages)


def for_recurrent(key: LaunchKey) -> ExactConfig:
    """A thread owns all K entries of its channels, so that sums over K, in `ROWS` chains, need no exchange; 256 take two."""
    BK = padded_state_size(key.K)
    if BK == 256:
        # left alone, the assembler gives it 32 registers
        return ExactConfig(32, BK=BK, num_warps=2, maxnreg=255 if key.card.backend == 'cuda' else None)
    # for 64 tokens, one stage is predicted to take 2.9 times as long at K = 16 and 1.2 times at 64; elsewhere nearly the same
    return ExactConfig(64 if BK <= 32 else 32, BK=BK, ROWS=BK // 16, STAGES=3 if BK in (16, 64) else 1)
