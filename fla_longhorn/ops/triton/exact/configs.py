"""Launch parameters of the exact update's kernels: one function per kernel.

Where no other reason is given, the choice has the least predicted time on an H100 (`python -m benchmarks predict`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.common import padded_state_size
from fla_longhorn.ops.triton.device import ASYNC_COPIES, Card
from fla_longhorn.ops.triton.launch import LaunchConfig, LaunchKey

# tokens in a chunk: the substitution takes (CHUNK_SIZE - 1) / 2 FMA per token and channel; 32 rows do not fit in registers
CHUNK_SIZE = 16
# bytes for a state of 256 channels at K = 128 with float32 operands, which RTX cards do not have
WIDE_TF32 = 139264


@dataclass(frozen=True)
class ExactConfig(LaunchConfig):
    """Launch parameters of a program with a chunk `[BT, BV]` and a state `[BV, BK]`, held in slices `[BV, BS]`.

    `STAGES` chunks are in flight, or tokens of the recurrence: with two or more, asynchronous copies load q, k, G and A.
    `PREFETCH` loads the other inputs of the next chunk into registers, and `ROWS` rows of G are loaded before the
    substitution: without these, the forward at K = 16 is predicted to take 1.5 times as long, and the backward of one long
    sequence 1.2 times. `RELOAD` loads k twice instead of holding it: else the forward at K = 64 and 128 is predicted to take
    1.2 times as long.
    """

    BK: int
    BV: int
    BS: int = 0
    BT: int = CHUNK_SIZE
    STAGES: int = 1
    PREFETCH: bool = False
    RELOAD: bool = False
    ROWS: int = 0

    def __post_init__(self) -> None:
        if self.BS == 0:
            object.__setattr__(self, 'BS', self.BK)
        assert self.BK % self.BS == 0 and self.ROWS < CHUNK_SIZE and 16 <= CHUNK_SIZE <= self.BT

    @property
    def VEC(self) -> int:
        """Columns of a chunk that a thread owns; single ones take 21% more instructions in the replay at K = 16."""
        return max(self.BV // (32 * self.num_warps), 1)

    def parameters(self) -> dict[str, int]:
        return super().parameters() | {'VEC': self.VEC}


def state_parts(K: int, precision: str, gated: bool = False) -> int:
    """Parts of the states that products load: two in bfloat16 every 64 tokens move half the bytes of one every 16."""
    return 2 if precision == 'bf16' and padded_state_size(K) == 16 and not gated else 1


def span_size(K: int, precision: str, gated: bool = False) -> int:
    """Tokens between the states that products load, which are also the tokens of one of their programs.

    With a gate it is a chunk, because each doubling of a span takes two more products, of operands that have decayed to its
    middle.

    After K tokens a span's initial state is overwritten: it cancels against the updates, but its rounding error does not. So
    a span is longer than K only where the state is stored in two parts, and shorter where products are unrolled.
    """
    interval = checkpoint_interval(K)
    longest = padded_state_size(K) if state_parts(K, precision) == 1 else interval
    span = 16 if precision == 'ieee' or gated else min(64, longest)
    # a span holds whole chunks, and an interval whole spans
    assert span % CHUNK_SIZE == 0 == interval % span
    return span


def copies_ahead(card: Card) -> bool:
    """Whether to copy more chunks ahead than Triton's two stages do; tensor memory needs the shared memory itself."""
    return ASYNC_COPIES and card.backend == 'cuda' and not card.tensor_memory


def state_block(key: LaunchKey) -> ExactConfig:
    """Parameters with which the state `[BV, BK]` fits in registers."""
    BK, card = padded_state_size(key.K), key.card
    if key.precision == 'ieee' and BK >= 128:
        # without tensor cores operands are in registers, so threads share columns. Slices of 64 entries with fewer channels
        # spill up to 460 instructions where these spill up to 10,000 (K = 256, sm_89), but the predicted time of a pass on an
        # H100 is 1.4 and 1.5 times as long at K = 128, and 0.9 and 1.4 times at K = 256 (forward, backward)
        return ExactConfig(BK, 8192 // BK if card.backend == 'hip' else 64, num_warps=8)
    if key.precision == 'ieee' and BK == 64 and card.mma:
        # with 128 channels a program spills thousands of registers
        return ExactConfig(BK, 32, num_warps=4)
    if key.precision == 'tf32' and BK == 128 and card.tensor_memory:
        # the state and float32 operands of a warp group do not fit in tensor memory
        return ExactConfig(BK, 64, num_warps=2)
    if key.precision == 'tf32' and BK == 128 and card.shared_memory < WIDE_TF32:
        return ExactConfig(BK, 64, num_warps=4)
    if key.precision == 'bf16' and BK in (64, 128) and not card.tensor_memory:
        # one warp needs no synchronisation; a warp group may hold the state in tensor memory. Slices take fewer registers
        # for operands; those of 32 would have v's shape, and so k's layout. Without warp groups, two stages fit.
        stages = 1 if BK == 64 and not ASYNC_COPIES else 3 if BK == 128 and copies_ahead(card) and card.warp_groups else 2
        # Triton 3.7 has no code for pipelined operands as wide on gfx950
        stages = 1 if BK == 128 and card.name == 'gfx950' else stages
        return ExactConfig(BK, 32, BS=64, STAGES=stages)
    # at K = 256 two warps spill up to 690 instructions; four with slices of 128 spill 0 to 104, but half as many channels are
    # resident, and the predicted time of a pass is 1.7 to 1.9 times as long on an H100, 1.3 to 1.8 times on an A100
    BV, num_warps = {16: (64, 1), 32: (64, 2), 64: (128, 4), 128: (256, 8), 256: (32, 2)}[BK]
    return ExactConfig(BK, BV, num_warps=num_warps)


def for_gram(key: LaunchKey) -> ExactConfig:
    return ExactConfig(padded_state_size(key.K), 0)


def for_forward(key: LaunchKey) -> ExactConfig:
    """At K = 16 a thread owns one column, because with two it has too few registers to prefetch."""
    block = state_block(key)
    if block.BK == 16:
        return replace(block, BV=32, PREFETCH=key.precision != 'ieee', ROWS=8 if key.precision == 'bf16' else 0)
    if block.BK == 32:
        return replace(block, PREFETCH=True, ROWS=4 if key.precision == 'bf16' else 0)
    if block.num_warps == 1:
        # at K = 64 k is reloaded only if D or z need registers, at K = 128 v too; with three stages one program less fits
        return replace(block, RELOAD=True, ROWS=2 if block.BK == 64 else 0, STAGES=min(block.STAGES, 2))
    return block


def for_states(key: LaunchKey) -> ExactConfig:
    """The states-only pass of a split forward: more stages, because few warps are resident to hide the latency of copies.

    Its programs must be those of :func:`for_forward`: the same BV.
    """
    config = for_forward(key)
    ahead = copies_ahead(key.card) and key.card.warp_groups and key.precision == 'bf16' and config.num_warps == 1
    return replace(config, STAGES=3) if ahead else config


def for_replay(key: LaunchKey) -> ExactConfig:
    """The replay in backward; it prefetches nothing, so one warp has enough registers for K = 32."""
    block = state_block(key)
    if block.BK == 32:
        # operands of float32 are in registers too, those of two warps
        return block if key.precision == 'ieee' and key.card.mma else replace(block, num_warps=1)
    # at K = 64 registers spill with asynchronous copies
    return replace(block, STAGES=1) if block.BK == 64 else block


def for_backward(key: LaunchKey) -> ExactConfig:
    """The state's gradient is in registers, in place of the state."""
    block = state_block(key)
    if block.BK == 64 and not (key.precision == 'ieee' and key.card.mma):
        # one warp has too few registers to prefetch
        block = replace(block, BV=128, num_warps=4, BS=64, STAGES=1)
    if key.precision == 'bf16' and block.BK == 128 and key.card.tensor_memory:
        # the sums of two warp groups take twice the tensor memory that there is
        return replace(block, BV=64, num_warps=4)
    if key.precision == 'bf16' and block.BK == 256 and key.card.name == 'sm_80':
        # left alone, the assembler gives it 32 registers, and 4,723 instructions spill; with these 417 do
        return replace(block, maxnreg=255)
    if key.precision != 'bf16' or block.BK > 64:
        return block
    # copies of G and A: their loads from L2 would share a scoreboard with the next chunk's, and wait for DRAM
    stages = 2 if block.BK <= 32 and copies_ahead(key.card) else block.STAGES
    BV = 32 if block.BK == 16 else block.BV
    return replace(block, BV=BV, PREFETCH=True, ROWS={16: 6, 32: 4, 64: 0}[block.BK], STAGES=stages)


def for_products(key: LaunchKey, gated: bool) -> ExactConfig:
    """Five sums, `[BT, BK]` and `[BT, BT]`, fit in registers, together with operands that are there."""
    BK, BT, card = min(padded_state_size(key.K), 64), span_size(key.K, key.precision, gated), key.card
    if BK < BT and card.tensor_memory:
        # four warps would hold the sums in tensor memory, and move them for every block of channels
        return ExactConfig(BK, 32, BT=BT, num_warps=2)
    # wider float32 operands do not fit in shared memory, nor operands of a warp's products in registers
    narrow = key.precision == 'ieee' or BT == 64 and (card.mma or key.precision == 'tf32')
    # a warp group reads operands from shared memory, without the fence that Triton up to 3.6 lacks
    stages = 1 if BT == 64 and not card.mma and not ASYNC_COPIES else None
    return ExactConfig(BK, 32 if narrow else 64, BT=BT, num_warps=max(BK, BT) // 16, num_stages=stages)


def for_recurrent(key: LaunchKey) -> ExactConfig:
    """A thread owns all K entries of its channels, so that sums over K, in `ROWS` chains, need no exchange; 256 take two."""
    BK = padded_state_size(key.K)
    if BK == 256:
        # left alone, the assembler gives it 32 registers
        return ExactConfig(BK, 32, num_warps=2, maxnreg=255 if key.card.backend == 'cuda' else None)
    # one stage is predicted to take 2.9 times as long at K = 16 and 1.2 times at 64 for 64 tokens of 8 sequences; at 32 and
    # 128 three gain less than the error of predictions
    return ExactConfig(BK, 64 if BK <= 32 else 32, ROWS=BK // 16, STAGES=3 if BK in (16, 64) else 1)
