"""Launch parameters of the diagonal update's kernels, one function per kernel, and the layout of backward's scratch buffer."""

from __future__ import annotations

from dataclasses import dataclass, field

import triton

from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.common import padded_state_size
from fla_longhorn.ops.triton.launch import LaunchConfig, LaunchKey

# channels of a program of one warp in backward and in the summaries of segments
CHANNELS = 32
# programs of 32 channels that a multiprocessor should hold: two for each of its four schedulers
PROGRAMS_PER_MULTIPROCESSOR = 8
# a segment is not shorter: a second pass would cost more than it saves
MIN_SEGMENT_LENGTH = 256
# backward cuts a segment of at least this length into slices
MIN_SLICED_LENGTH = 1024
# programs of one warp that a multiprocessor's registers should hold where `maxnreg` limits them, an option for NVIDIA only
RESIDENT_PROGRAMS = 16


@dataclass(frozen=True)
class DiagonalConfig(LaunchConfig):
    """Launch parameters of a program with a state `[BK, BV]`, of one warp; `U` tokens are loaded ahead."""

    BK: int
    BV: int
    U: int = 1
    num_stages: int | None = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        assert self.BK >= 16 and 4 % self.U == 0 and self.num_warps == 1


@dataclass(frozen=True)
class TokensConfig(LaunchConfig):
    """Launch parameters of a program that has `BT` tokens of one head, with all their keys."""

    BT: int


@dataclass(frozen=True)
class EntriesConfig(LaunchConfig):
    """Launch parameters of a program that has `BS` entries of a state."""

    BS: int


def for_prepare(key: LaunchKey) -> TokensConfig:
    return TokensConfig(max(1024 // padded_state_size(key.K), 4), num_warps=4)


def for_forward(key: LaunchKey) -> DiagonalConfig:
    """At most 64 state entries a thread, which leaves registers for the rest, and a loop of at most 768 instructions.

    From K = 65 on, a warp has fewer channels than threads, and several threads share the entries of a channel.
    """
    BK = padded_state_size(key.K)
    return DiagonalConfig(BK, min(32, 2048 // BK), U={16: 4, 32: 2}.get(BK, 1))


def for_backward(key: LaunchKey, gated: bool, sigmoid: bool) -> DiagonalConfig:
    """By blocks of 16 entries of K: a channel a thread, so that nothing waits for another warp.

    With two tokens a block half as many states are saved. With a gate, sums in float32, or beta itself in place of its logit,
    such a loop has more than 768 instructions.
    """
    return DiagonalConfig(16, CHANNELS, U=2 if sigmoid and not gated and key.precision != 'ieee' else 1)


def for_reduce(key: LaunchKey) -> TokensConfig:
    return TokensConfig(max(512 // padded_state_size(key.K), 2), num_warps=2)


def for_segments(key: LaunchKey) -> DiagonalConfig:
    """Blocks as in backward."""
    few = key.card.registers // (32 * RESIDENT_PROGRAMS) if key.card.backend == 'cuda' else None
    return DiagonalConfig(16, CHANNELS, U=2, maxnreg=few)


def for_combine(key: LaunchKey) -> EntriesConfig:
    return EntriesConfig(128)


def for_step(key: LaunchKey) -> DiagonalConfig:
    BK = padded_state_size(key.K)
    return DiagonalConfig(BK, max(min(triton.next_power_of_2(key.V), 1024 // BK), 16))


def slice_length(length: int, K: int, is_varlen: bool) -> int:
    """Tokens of a segment of `length` that one launch of backward processes, and keeps partial sums of dq and dk for.

    Packed sequences are not sliced: where their lengths differ, a slice would leave programs without work.
    """
    if is_varlen or length < MIN_SLICED_LENGTH:
        return length
    interval = checkpoint_interval(K)
    return triton.cdiv(length, interval * (2 if K <= 32 else 4)) * interval


@triton.constexpr_function
def scratch_sizes(INTERVAL, NK, BK, BV, U, SCALAR_BETA, HAS_G):
    """Floats of the two parts of a program's scratch buffer in backward.

    First the states of a chunk, one for each block of U tokens; then for each token and channel, terms to sum over channels,
    and sums over the blocks of K so far.
    """
    sums = (2 if SCALAR_BETA else 1) + (3 + HAS_G if NK > 1 else 0)
    return INTERVAL // U * BK * BV, sums * INTERVAL * BV
