"""The kernels of the exact update as data for the compiled figures: arguments, constants, and the work of an iteration.

`ROWS` and `INFERENCE_ROWS` hold the fields of rows of :mod:`benchmarks.kernels`.

    python -m benchmarks.exact_rows [target ...]     one line of JSON a kernel; without TRITON_INTERPRET
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from benchmarks.compiled import Compiled, compile_kernel
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.exact_bwd import backward_tile, chunk_longhorn_exact_bwd_kernel
from fla_longhorn.ops.exact_bwd_qk import chunk_longhorn_exact_bwd_kernel_qk, products_tile, span_size
from fla_longhorn.ops.exact_common import CHUNK_SIZE, state_tile
from fla_longhorn.ops.exact_fwd import chunk_longhorn_exact_fwd_kernel_o, forward_tile
from fla_longhorn.ops.exact_gram import chunk_longhorn_exact_kernel_gram
from fla_longhorn.ops.exact_recurrent import fused_recurrent_longhorn_exact_fwd_kernel, recurrent_tile
from fla_longhorn.ops.exact_replay import chunk_longhorn_exact_bwd_kernel_replay, replay_tile

# channels of the paper's 1.3B layer
V = 4096
PRECISIONS = {'bf16': 'bf16', 'fp16': 'tf32', 'fp32': 'ieee'}
# flag of a kernel -> the arguments, with their types, that are present with it ('x': the dtype of the inputs)
OPTIONS = {
    'HAS_D': {'D': '*x', 'dD': '*fp32'},
    'HAS_Z': {'z': '*x', 'dz': '*x'},
    'USE_INITIAL_STATE': {'h0': '*fp32', 'dh0': '*fp32'},
    'STORE_FINAL_STATE': {'ht': '*fp32'},
    'USE_FINAL_STATE_GRADIENT': {'dht': '*fp32'},
    'SAVE_STATES': {'states': '*fp32'},
    'IS_VARLEN': {'cu_seqlens': '*i64'},
}
PLAIN = ('HAS_SCALE', 'USE_BETA_SIGMOID', 'SCALAR_BETA', 'STATE_V_FIRST')


@dataclass
class ExactKernel:
    """A kernel to compile; `work` is the (token, channel) pairs of a thread in an iteration of its innermost loops."""

    name: str
    part: str
    K: int
    dtype: str
    kernel: object
    types: dict[str, str]
    constants: dict[str, object]
    num_warps: int
    work: float

    def compile(self, target: str) -> Compiled:
        return compile_kernel(self.kernel, self.types, self.constants, target, self.num_warps)


def exact_kernel(name: str, K: int, dtype: str = 'bf16', target: str = 'sm_90', **flags: bool) -> ExactKernel:
    """`name`: fwd, recurrent, gram, replay, bwd or qk, with the flags that are not False."""
    precision = 'ieee' if dtype == 'fp16' and target == 'gfx942' else PRECISIONS[dtype]
    operand = '*bf16' if precision == 'bf16' else '*fp32'
    x = '*' + dtype
    inputs = {'q': x, 'k': x, 'v': x, 'beta': x}
    flags = {flag: flags.get(flag, False) for flag in (*OPTIONS, *PLAIN)}
    constants = dict(
        H=1, K=K, V=V, BT=CHUNK_SIZE, BK=state_tile(K), INTERVAL=checkpoint_interval(K), SPAN=span_size(K, precision),
        DOT=precision, A_PARTS=1 if precision == 'ieee' else 2, **flags,
    )
    if name == 'fwd':
        kernel, part, tile = chunk_longhorn_exact_fwd_kernel_o, 'forward', forward_tile(K, flags['SAVE_STATES'])
        types = inputs | {'g': '*fp32', 'a': operand, 'o': x, 'scale': 'fp32', 'T': 'i32'}
    elif name == 'recurrent':
        kernel, part, tile = fused_recurrent_longhorn_exact_fwd_kernel, 'forward', recurrent_tile(K)
        types = inputs | {'o': x, 'scale': 'fp32', 'T': 'i32'}
    elif name == 'replay':
        kernel, part, tile = chunk_longhorn_exact_bwd_kernel_replay, 'backward', replay_tile(K)
        types = inputs | {'do': x, 'cs': '*fp32', 'a': operand, 'us': operand, 'hs': operand, 'dy': operand, 'scale': 'fp32'}
        types |= {'g': '*fp32', 'states': '*fp32', 'T': 'i32', 'N': 'i32'}
    elif name == 'bwd':
        kernel, part, tile = chunk_longhorn_exact_bwd_kernel, 'backward', backward_tile(K)
        types = inputs | dict.fromkeys(('dy', 'dv', 'dbeta'), x) | dict.fromkeys(('a', 'ws', 'dhs'), operand)
        types |= {'cs': '*fp32', 'g': '*fp32', 'scale': 'fp32', 'T': 'i32'}
        constants['STORE_W'] = operand != x or flags['HAS_D'] or flags['SCALAR_BETA']
    elif name == 'gram':
        kernel, part, tile = chunk_longhorn_exact_kernel_gram, 'forward', {'num_warps': 1}
        types = {'q': x, 'k': x, 'g': '*fp32', 'a': operand, 'scale': 'fp32', 'T': 'i32', 'N': 'i32'}
    else:
        kernel, part, tile = chunk_longhorn_exact_bwd_kernel_qk, 'backward', products_tile(K, precision)
        types = dict.fromkeys(('q', 'k', 'beta', 'dy', 'dq', 'dk', 'dbeta'), x) | {'scale': 'fp32', 'T': 'i32', 'N': 'i32'}
        types |= dict.fromkeys(('us', 'ws', 'hs', 'dhs'), operand)
        constants['BT'] = span_size(K, precision)
    for flag, arguments in OPTIONS.items():
        for argument, type_ in arguments.items():
            if flags[flag]:
                types.setdefault(argument, type_.replace('x', dtype))
            else:
                constants[argument] = None
    constants |= tile
    num_warps = constants.pop('num_warps')
    arguments = argument_names(kernel)
    types = {n: t for n, t in types.items() if n in arguments}
    constants = {n: c for n, c in constants.items() if n in arguments and n not in types}
    tokens = constants.get('BT', 1)
    work = tokens * constants.get('BV', 0) / (32 * num_warps)
    return ExactKernel(name, part, K, dtype, kernel, types, constants, num_warps, work)


def argument_names(kernel) -> list[str]:
    while not hasattr(kernel, 'arg_names') or not hasattr(kernel, 'params'):
        kernel = kernel.fn
    return kernel.arg_names


def hot_loops(compiled: Compiled) -> list:
    """The loops over chunks or tokens; shorter ones wait for the tensor cores."""
    loops = [loop for loop in compiled.loops if loop.instructions > 60]
    return [loop for loop in loops if loop.depth == max(other.depth for other in loops)]


def instructions_per_token_channel(row: ExactKernel, compiled: Compiled) -> float | None:
    """Instructions of a lane for each (token, channel) that it serves; None where the target's code shows no loops."""
    lanes = 32 * row.num_warps
    if row.name == 'gram':
        # no loop: a program serves all channels of a chunk
        return sum(compiled.mix.values()) * lanes / (CHUNK_SIZE * V) if compiled.mix['LDG'] else None
    hot = hot_loops(compiled)
    if not hot:
        return None
    instructions = sum(loop.instructions for loop in hot)
    return instructions / row.work


def measure(row: ExactKernel, target: str) -> dict[str, object]:
    """The figures of one kernel; shuffles and barriers are those of its innermost loops."""
    compiled = row.compile(target)
    instructions, hot = instructions_per_token_channel(row, compiled), hot_loops(compiled)
    saving = row.name == 'fwd' and row.constants['SAVE_STATES']
    return {
        'kernel': row.name + ('_saving_states' if saving else ''), 'update': 'exact', 'pass': row.part,
        'target': target, 'dtype': row.dtype, 'K': row.K, 'registers': compiled.registers, 'spills': compiled.spills,
        'shared_bytes': compiled.shared_bytes, 'shuffles': sum(loop.mix['SHFL'] for loop in hot) if hot else None,
        'barriers': sum(loop.mix['BAR'] for loop in hot) if hot else None,
        'instructions_per_state_update': instructions and round(instructions / row.K, 2),
        'instructions_per_token_channel': instructions and round(instructions, 1),
    }


def table_row(name: str, label: str, direction: str, **flags: bool) -> tuple:
    """(kernel, update, direction, function, arguments, cost), the fields of a row of `benchmarks.kernels`."""
    def arguments(K: int, dtype: str, target: str) -> tuple[dict, dict, int]:
        row = exact_kernel(name, K, dtype, target, **flags)
        return row.types, row.constants, row.num_warps

    def cost(compiled: Compiled, K: int) -> float | None:
        instructions = instructions_per_token_channel(exact_kernel(name, K, **flags), compiled)
        return None if instructions is None else instructions / K

    return label, 'exact', direction, exact_kernel(name, 16, **flags).kernel, arguments, cost


# the passes of a training step
ROWS = (
    table_row('gram', 'gram', 'forward'),
    table_row('fwd', 'forward', 'forward', SAVE_STATES=True),
    table_row('gram', 'gram', 'backward'),
    table_row('replay', 'replay', 'backward'),
    table_row('bwd', 'backward', 'backward'),
    table_row('qk', 'products', 'backward'),
)
# without gradients: whole sequences, and token by token
INFERENCE_ROWS = (
    table_row('fwd', 'forward', 'inference'),
    table_row('recurrent', 'recurrent', 'decoding'),
)
STATE_SIZES = (16, 64, 128)


if __name__ == '__main__':
    for wanted in sys.argv[1:] or ['sm_90']:
        for size in STATE_SIZES:
            for which, options in (('fwd', {}), ('fwd', {'SAVE_STATES': True}), ('recurrent', {}), ('bwd', {})):
                print(json.dumps(measure(exact_kernel(which, size, target=wanted, **options), wanted)), flush=True)
