"""Registers, spills, shared memory and instructions per state update of each compiled kernel, for every target.

    python -m benchmarks kernels [--json FILE] [--target sm_90 ...] [--K 16 ...]

The kernels are those that the operators launch, compiled for their arguments. A state update is one of K * V entries for one
token. `instructions_per_state_update` counts, per lane, the instructions of a kernel's loops divided by the lane's state
updates, each loop weighted by how often it runs; the rows of a pass add up to its cost. The exact update's cost hardly grows
with K: for it, `instructions_per_token_channel` counts the instructions per token and channel, for all K entries.
`issue_bound_ms` is the time to issue them on a GPU of the target, without any stall, for the paper's 1.3B layer (B=8, T=2048,
V=4096).

Needs no GPU, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.measure.timing import write_report
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton import longhorn_bwd, longhorn_fwd
from offgpu.absent_device import TARGETS
from offgpu.compiled import Compiled, Loop
from offgpu.launches import Launch, rehearsal

# the paper's 1.3B layer, and the tokens of its batch
V, TOKENS = 4096, 8 * 2048
# lane-instructions per second at the boost clock of an A100, H100 and B200 (SXM): multiprocessors * 128 lanes * clock
ISSUE_RATES = {'sm_80': 108 * 128 * 1.41e9, 'sm_90': 132 * 128 * 1.755e9, 'sm_100': 148 * 128 * 1.85e9}
STATE_SIZES = (16, 32, 64, 128)
DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
# rows and tokens: whole sequences that fill a device, and one that is split into segments. Odd lengths, so that no kernel is
# specialised for a multiple of 16
FULL, LONG = (65, 2047), (1, 131071)


@dataclass(frozen=True)
class Row:
    """One kernel of a pass; `cost` gives the instructions per state update from the launch, its code and K."""

    kernel: str
    update: str
    direction: str
    function: str
    cost: Callable[[Launch, Compiled, int], float | None] = field(repr=False)


def hottest(compiled: Compiled) -> Loop | None:
    """The longest of the innermost loops."""
    return max(compiled.loops, key=lambda loop: (loop.depth, loop.instructions), default=None)


def hot_loops(compiled: Compiled) -> list[Loop]:
    """The loops over chunks or tokens; shorter ones wait for the tensor cores."""
    loops = [loop for loop in compiled.loops if loop.instructions > 60]
    return [loop for loop in loops if loop.depth == max(other.depth for other in loops)]


def prepare_cost(launch: Launch, compiled: Compiled, K: int) -> float | None:
    """A kernel without a loop: all its instructions, per token of a program."""
    if 'FADD' not in compiled.mix:
        return None
    instructions = sum(compiled.mix.values()) - compiled.mix['NOP']
    return instructions * 32 * launch.num_warps / launch.constants['BT'] / (K * V)


def forward_cost(launch: Launch, compiled: Compiled, K: int) -> float | None:
    """The unrolled loop, and around it the loop over chunks, which runs once for C tokens."""
    hot = hottest(compiled)
    if hot is None:
        return None
    entries = K * launch.constants['BV'] / 32
    around = sum(x.instructions for x in compiled.loops if x.depth == 0 and x is not hot and 'FFMA' not in x.mix)
    return hot.instructions / (launch.constants['U'] * entries) + around / (checkpoint_interval(K) * entries)


def backward_cost(launch: Launch, compiled: Compiled, K: int) -> float | None:
    """Replay (all blocks of four tokens of a chunk but one) and the backward loop, and what runs once per chunk."""
    if not compiled.loops:
        return None
    C, blocks = checkpoint_interval(K), checkpoint_interval(K) // 4
    depth = max(loop.depth for loop in compiled.loops)
    replay, back = sorted((x for x in compiled.loops if x.depth == depth), key=lambda x: x.instructions)[-2:]
    around = next(x for x in reversed(compiled.loops) if x.depth == depth - 1 and x.order < replay.order)
    return (replay.instructions * (blocks - 1) + back.instructions * blocks + around.instructions) / (C * 16)


def reduce_cost(launch: Launch, compiled: Compiled, K: int) -> float | None:
    hot = hottest(compiled)
    if hot is None:
        return None
    # wide loads of a thread for four channel blocks: two tiles of 512 entries or more for each, and the sums
    threads = 32 * launch.num_warps
    loads = 2 * math.ceil(max(512, 2 * launch.constants['KP']) / threads) + math.ceil(4 * launch.constants['BT'] / threads)
    unrolled = 4 * max(round(hot.mix['LDG'] / loads), 1)
    return hot.instructions * threads * launch.constants['NV'] / unrolled / (launch.constants['BT'] * K * V)


def segment_cost(launch: Launch, compiled: Compiled, K: int) -> float | None:
    hot = hottest(compiled)
    return None if hot is None else hot.instructions / (4 * 16)


def gram_cost(launch: Launch, compiled: Compiled, K: int) -> float | None:
    """No loop: a program serves all channels of a chunk."""
    if not compiled.mix['LDG']:
        return None
    return sum(compiled.mix.values()) * 32 * launch.num_warps / (launch.constants['BT'] * V) / K


def exact_cost(launch: Launch, compiled: Compiled, K: int) -> float | None:
    """Instructions of a lane in an iteration, for its (token, channel) pairs and its part of the keys."""
    hot, constants = hot_loops(compiled), launch.constants
    if not hot:
        return None
    pairs = constants.get('BT', 1) * constants['BV'] / (32 * launch.num_warps)
    if launch.kernel.endswith('kernel_qk'):
        pairs *= constants['BK'] / max(1 << (K - 1).bit_length(), 16)
    return sum(loop.instructions for loop in hot) / pairs / K


ROWS = (
    Row('prepare', 'diagonal', 'forward', 'longhorn_prepare_kernel', prepare_cost),
    Row('forward', 'diagonal', 'forward', 'longhorn_fwd_kernel', forward_cost),
    Row('prepare', 'diagonal', 'backward', 'longhorn_prepare_kernel', prepare_cost),
    Row('backward', 'diagonal', 'backward', 'longhorn_bwd_kernel', backward_cost),
    Row('reduce', 'diagonal', 'backward', 'longhorn_reduce_kernel', reduce_cost),
    Row('gram', 'exact', 'forward', 'chunk_longhorn_exact_kernel_gram', gram_cost),
    Row('forward', 'exact', 'forward', 'chunk_longhorn_exact_fwd_kernel_o', exact_cost),
    Row('gram', 'exact', 'backward', 'chunk_longhorn_exact_kernel_gram', gram_cost),
    Row('replay', 'exact', 'backward', 'chunk_longhorn_exact_bwd_kernel_replay', exact_cost),
    Row('backward', 'exact', 'backward', 'chunk_longhorn_exact_bwd_kernel', exact_cost),
    Row('products', 'exact', 'backward', 'chunk_longhorn_exact_bwd_kernel_qk', exact_cost),
    # run only if a sequence is split, so they do not count in a pass that fills the device
    Row('segment', 'diagonal', 'forward segments', 'longhorn_segment_kernel', segment_cost),
    Row('segment', 'diagonal', 'backward segments', 'longhorn_segment_kernel', segment_cost),
    # without gradients: whole sequences, and token by token
    Row('forward', 'exact', 'inference', 'chunk_longhorn_exact_fwd_kernel_o', exact_cost),
    Row('recurrent', 'exact', 'decoding', 'fused_recurrent_longhorn_exact_fwd_kernel', exact_cost),
)


def launches(update: str, direction: str, target: str, K: int, dtype: str = 'bf16') -> dict[str, Launch]:
    """The compiled launches of a pass without gate, skip and sigmoid, by kernel name."""
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPES[dtype], device='meta')

    B, T = LONG if 'segments' in direction else FULL
    args = Arguments(*(empty(B, T, 1, n) for n in (K, K, V, V)), exact=update == 'exact')
    options = {'save_states': direction not in ('inference', 'decoding'), 'parallel': direction != 'decoding'}
    backward = direction.startswith('backward')
    with rehearsal(target, 'launch' if backward else 'code') as taken:
        o, _, states = longhorn_fwd(args, **options)
        found = list(taken)
    if backward:
        with rehearsal(target, 'code') as taken:
            longhorn_bwd(torch.empty_like(o), None, states, args, parallel=True)
            found = list(taken)
    return {x.kernel: x for x in found}


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


def count(row: Row, launch: Launch, K: int, dtype: str) -> Result:
    """The figures of one compiled launch."""
    compiled, target = launch.compiled(), launch.target
    nvidia = TARGETS[target].backend == 'cuda'
    cost = row.cost(launch, compiled, K) if nvidia else None
    return Result(
        kernel=row.kernel, update=row.update, direction=row.direction, target=target, dtype=dtype, K=K,
        registers=compiled.registers, spills=compiled.spills, shared_bytes=launch.shared,
        shuffles=compiled.count('SHFL') if nvidia else compiled.count('ds_bpermute_b32', 'ds_swizzle_b32'),
        loop_shuffles=sum(loop.mix['SHFL'] for loop in hot_loops(compiled)) if nvidia else None,
        barriers=compiled.count('BAR') if nvidia else compiled.count('s_barrier'),
        instructions_per_state_update=None if cost is None else round(cost, 3),
        # the measure where tensor cores compute the products over K
        instructions_per_token_channel=None if cost is None or row.update != 'exact' else round(cost * K, 1),
        issue_bound_ms=None if cost is None else round(1e3 * cost * TOKENS * V * K / ISSUE_RATES[target], 4),
    )


def measure(update: str, direction: str, target: str, K: int, dtype: str = 'bf16') -> list[Result]:
    """The rows of a pass."""
    taken = launches(update, direction, target, K, dtype)
    rows = [row for row in ROWS if (row.update, row.direction) == (update, direction)]
    return [count(row, taken[row.function], K, dtype) for row in rows]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks kernels', description=__doc__.splitlines()[0])
    parser.add_argument('--json', help='file for the rows')
    parser.add_argument('--target', nargs='+', default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument('--K', nargs='+', type=int, default=list(STATE_SIZES))
    parser.add_argument('--dtype', default='bf16', choices=list(DTYPES))
    options = parser.parse_args(args)

    results = []
    columns = list(Result.__dataclass_fields__)
    print('  '.join(f'{name:>12.12}' for name in columns), flush=True)
    for target in options.target:
        for K in options.K:
            for update, direction in dict.fromkeys((row.update, row.direction) for row in ROWS):
                for result in measure(update, direction, target, K, options.dtype):
                    results.append(result)
                    print('  '.join(f'{getattr(result, name)!s:>12.12}' for name in columns), flush=True)
    if options.json:
        write_report([result.as_json() for result in results], options.json)
