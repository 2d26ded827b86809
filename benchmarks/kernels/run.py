"""What each kernel compiles to, on every target: registers, spills, shared memory, instructions per state update.

    python -m benchmarks.kernels [--json FILE] [--target sm_90 ...] [--K 16 ...]

A state update is one of K * V entries for one token. `instructions_per_state_update` counts, per lane, the instructions of a
kernel's loops divided by the state updates that a lane does in them, each loop weighted by how often it runs; the rows of one
pass add up to its cost. The exact update's cost hardly grows with K; for it, `instructions_per_token_channel` counts those
for a token and channel with all its K entries. `issue_bound_ms` is the time that a GPU of the target takes to issue them for
the paper's 1.3B layer (B=8, T=2048, V=4096), were there nothing to wait for.

Needs no GPU, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from benchmarks.kernels import exact_rows
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.common import FUSED, row_arguments
from fla_longhorn.ops.triton.diagonal import backward as diagonal_bwd
from fla_longhorn.ops.triton.diagonal import common as diagonal_common
from fla_longhorn.ops.triton.diagonal import forward as diagonal_fwd
from fla_longhorn.ops.triton.diagonal import segments
from offgpu.compiled import TARGETS, Compiled, compile_kernel

# the paper's 1.3B layer, and the tokens of its batch
V, H = 4096, 1
TOKENS = 8 * 2048
# lane-instructions a second at the boost clock of an A100, H100 and B200 (SXM): multiprocessors * 128 lanes * clock
ISSUE_RATES = {'sm_80': 108 * 128 * 1.41e9, 'sm_90': 132 * 128 * 1.755e9, 'sm_100': 148 * 128 * 1.85e9}
STATE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Row:
    """One kernel in the table. `cost` gives the instructions per state update from the compiled kernel, K and the dtype."""

    kernel: str
    update: str
    direction: str
    function: object
    arguments: Callable[[int, str, str], tuple[dict, dict, int]]
    cost: Callable[[Compiled, int, str], float | None] = field(repr=False)


def forward_arguments(K: int, dtype: str, target: str) -> tuple[dict, dict, int]:
    tiles = diagonal_fwd.forward_tiles(K, V)
    types = dict.fromkeys(('v', 'beta', 'o'), f'*{dtype}') | dict.fromkeys(('rows', 'states'), '*fp32')
    types |= dict.fromkeys(('T', 'TT', 'N', 'L', 'C'), 'i32')
    constants = dict(
        D=None, z=None, h0=None, ht=None, cu_seqlens=None, H=H, K=K, V=V, S_V=H * V, S_Z=0, R=2 * tiles['BK'] + 4,
        SIGMOID=False, SCALAR_BETA=False, STATE_V_FIRST=False, IS_VARLEN=False, USE_INITIAL_STATE=False,
        STORE_FINAL_STATE=False, SAVE_STATES=True, HAS_D=False, HAS_Z=False, MASKED=False,
        PAIRS=dtype == 'bf16' and tiles['BC'] == 2, CUT=False, **row_arguments(None, H * K * V), **tiles,
    )
    return types, constants, 1


def backward_arguments(K: int, dtype: str, target: str) -> tuple[dict, dict, int]:
    types = dict.fromkeys(('v', 'beta', 'do', 'dv', 'dbeta'), f'*{dtype}')
    types |= dict.fromkeys(('rows', 'states', 'part', 'scratch'), '*fp32') | dict.fromkeys(('T', 'TT', 'N', 'L', 'NS'), 'i32')
    constants = dict(
        D=None, z=None, dht=None, dD=None, dz=None, dh0=None, cu_seqlens=None, H=H, K=K, V=V, S_V=H * V, S_Z=0, S_DO=H * V,
        R=2 * diagonal_common.padded_state_size(K) + 4, KP=diagonal_common.padded_state_size(K), C=checkpoint_interval(K),
        BK=16, BV=diagonal_bwd.BLOCK_OF_CHANNELS, ROWS=1,
        PRECISE=dtype == 'fp32', SIGMOID=False, SCALAR_BETA=False, STATE_V_FIRST=False, IS_VARLEN=False,
        USE_FINAL_STATE_GRADIENT=False, STORE_INITIAL_STATE_GRADIENT=False, HAS_D=False, HAS_Z=False, MASKED=False,
    )
    return types, constants, 1


def prepare_arguments(K: int, dtype: str, target: str) -> tuple[dict, dict, int]:
    BK = diagonal_common.padded_state_size(K)
    types = dict(q=f'*{dtype}', k=f'*{dtype}', rows='*fp32', scale='fp32')
    types |= dict.fromkeys(('T', 'TT', 's_qb', 's_qt', 's_qh', 's_kb', 's_kt', 's_kh'), 'i32')
    constants = dict(
        s_qk=1, s_kk=1, H=H, K=K, BT=max(1024 // BK, 4), BK=BK, R=2 * BK + 4, PADDED=BK != K, SQUARES=False,
    )
    return types, constants, 4


def reduce_arguments(K: int, dtype: str, target: str) -> tuple[dict, dict, int]:
    KP = diagonal_common.padded_state_size(K)
    types = dict.fromkeys(('part', 'rows'), '*fp32') | dict.fromkeys(('dq', 'dk', 'dbeta'), f'*{dtype}')
    types |= dict(scale='fp32', TT='i32')
    constants = dict(
        NV=V // diagonal_bwd.BLOCK_OF_CHANNELS, H=H, K=K, R=2 * KP + 4, KP=KP, BT=max(512 // KP, 2), SCALAR_BETA=False,
    )
    return types, constants, 2


def segment_arguments(reverse: bool) -> Callable:
    def arguments(K: int, dtype: str, target: str) -> tuple[dict, dict, int]:
        KP = diagonal_common.padded_state_size(K)
        types = dict.fromkeys(('x', 'beta'), f'*{dtype}') | dict.fromkeys(('rows', 'decay', 'local'), '*fp32')
        types |= dict.fromkeys(('T', 'TT', 'N', 'L'), 'i32')
        constants = dict(
            z=None, cu_seqlens=None, H=H, K=K, V=V, S_X=H * V, S_Z=0, R=(3 if reverse else 2) * KP + 4, KP=KP, BK=16,
            BV=32, REVERSE=reverse, SIGMOID=False, SCALAR_BETA=False, STATE_V_FIRST=False,
            IS_VARLEN=False, HAS_Z=False, MASKED=False,
        )
        return types, constants, 1
    return arguments


def forward_cost(compiled: Compiled, K: int, dtype: str) -> float | None:
    """The unrolled loop, and around it the loop over chunks, which runs once for C tokens."""
    tiles = diagonal_fwd.forward_tiles(K, V)
    hot = hottest(compiled)
    if hot is None:
        return None
    entries = K * tiles['BV'] / 32
    around = [loop for loop in compiled.loops if loop.depth == 0 and loop is not hot and 'FFMA' not in loop.mix]
    return hot.instructions / (tiles['U'] * entries) + sum(x.instructions for x in around) / (checkpoint_interval(K) * entries)


def backward_cost(compiled: Compiled, K: int, dtype: str) -> float | None:
    """Replay (all blocks of four tokens of a chunk but one) and the way back; around them what runs once for a chunk."""
    if not compiled.loops:
        return None
    C, blocks = checkpoint_interval(K), checkpoint_interval(K) // 4
    depth = max(loop.depth for loop in compiled.loops)
    replay, back = sorted((x for x in compiled.loops if x.depth == depth), key=lambda x: x.instructions)[-2:]
    around = next(x for x in reversed(compiled.loops) if x.depth == depth - 1 and x.order < replay.order)
    return (replay.instructions * (blocks - 1) + back.instructions * blocks + around.instructions) / (C * 16)


def prepare_cost(compiled: Compiled, K: int, dtype: str) -> float | None:
    """A kernel without a loop: all its instructions in 128 lanes, for the tokens of a program."""
    if 'FADD' not in compiled.mix:
        return None
    instructions = sum(compiled.mix.values()) - compiled.mix['NOP']
    return instructions * 128 / max(1024 // diagonal_common.padded_state_size(K), 4) / (K * V)


def reduce_cost(compiled: Compiled, K: int, dtype: str) -> float | None:
    hot = hottest(compiled)
    if hot is None:
        return None
    KP = diagonal_common.padded_state_size(K)
    blocks = V // diagonal_bwd.BLOCK_OF_CHANNELS
    unrolled = max(hot.mix['LDG'] // loads_per_block(KP), 1)
    return hot.instructions * 64 * blocks / unrolled / (max(512 // KP, 2) * K * V)


def loads_per_block(KP: int) -> int:
    """Wide loads of a thread for one channel block: two tiles of 512 entries or more over 64 threads, and the sums."""
    return 2 * math.ceil(max(512, 2 * KP) / 64 / 4) + 1


def segment_cost(compiled: Compiled, K: int, dtype: str) -> float | None:
    hot = hottest(compiled)
    return None if hot is None else hot.instructions / (4 * 16)


def hottest(compiled: Compiled):
    """The deepest loop, and of those the longest."""
    return max(compiled.loops, key=lambda loop: (loop.depth, loop.instructions), default=None)


ROWS = (
    Row('prepare', 'diagonal', 'forward', diagonal_common.longhorn_prepare_kernel, prepare_arguments, prepare_cost),
    Row('forward', 'diagonal', 'forward', diagonal_fwd.longhorn_fwd_kernel, forward_arguments, forward_cost),
    Row('prepare', 'diagonal', 'backward', diagonal_common.longhorn_prepare_kernel, prepare_arguments, prepare_cost),
    Row('backward', 'diagonal', 'backward', diagonal_bwd.longhorn_bwd_kernel, backward_arguments, backward_cost),
    Row('reduce', 'diagonal', 'backward', diagonal_bwd.longhorn_reduce_kernel, reduce_arguments, reduce_cost),
    *(Row(*fields) for fields in exact_rows.ROWS),
)

# run before the others only where time is cut into segments, so their cost is not part of a pass on a filled device
SEGMENT_ROWS = (
    Row('segment', 'diagonal', 'forward segments', segments.longhorn_segment_kernel, segment_arguments(False), segment_cost),
    Row('segment', 'diagonal', 'backward segments', segments.longhorn_segment_kernel, segment_arguments(True), segment_cost),
)

# the exact update without gradients: whole sequences, and token by token
INFERENCE_ROWS = tuple(Row(*fields) for fields in exact_rows.INFERENCE_ROWS)


@dataclass
class Result:
    kernel: str
    update: str
    direction: str
    target: str
    dtype: str
    K: int
    registers: int | None
    spills: int | None
    shared_bytes: int
    shuffles: int | None
    loop_shuffles: int | None
    barriers: int | None
    instructions_per_state_update: float | None
    instructions_per_token_channel: float | None
    issue_bound_ms: float | None

    def as_json(self) -> dict:
        row = asdict(self)
        return {'pass' if key == 'direction' else key: value for key, value in row.items()}


def measure(row: Row, target: str, K: int, dtype: str = 'bf16') -> Result:
    """Compile one kernel for one target and count."""
    types, constants, num_warps = row.arguments(K, dtype, target)
    compiled = compile_kernel(row.function, types, constants, target, num_warps, **FUSED)
    nvidia = TARGETS[target].backend == 'cuda'
    cost = row.cost(compiled, K, dtype) if nvidia else None
    return Result(
        kernel=row.kernel, update=row.update, direction=row.direction, target=target, dtype=dtype, K=K,
        registers=compiled.registers, spills=compiled.spills, shared_bytes=compiled.shared_bytes,
        shuffles=compiled.count('SHFL') if nvidia else compiled.count('ds_bpermute_b32', 'ds_swizzle_b32'),
        loop_shuffles=sum(loop.mix['SHFL'] for loop in exact_rows.hot_loops(compiled)) if nvidia else None,
        barriers=compiled.count('BAR') if nvidia else compiled.count('s_barrier'),
        instructions_per_state_update=None if cost is None else round(cost, 3),
        # what counts where products over K are the tensor cores'
        instructions_per_token_channel=None if cost is None or row.update != 'exact' else round(cost * K, 1),
        issue_bound_ms=None if cost is None else round(1e3 * cost * TOKENS * V * K / ISSUE_RATES[target], 4),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--json', help='file for the rows')
    parser.add_argument('--target', nargs='+', default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument('--K', nargs='+', type=int, default=list(STATE_SIZES))
    parser.add_argument('--dtype', default='bf16', choices=('bf16', 'fp16', 'fp32'))
    args = parser.parse_args()

    results = []
    columns = list(Result.__dataclass_fields__)
    print('  '.join(f'{name:>12.12}' for name in columns), flush=True)
    for target in args.target:
        for K in args.K:
            for row in (*ROWS, *SEGMENT_ROWS, *INFERENCE_ROWS):
                results.append(measure(row, target, K, args.dtype))
                print('  '.join(f'{getattr(results[-1], name)!s:>12.12}' for name in columns), flush=True)
    if args.json:
        with open(args.json, 'w') as file:
            json.dump([result.as_json() for result in results], file, indent=1)
