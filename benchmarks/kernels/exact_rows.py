"""The kernels of the exact update as data for the compiled figures: arguments, constants, and the work of an iteration.

`ROWS` and `INFERENCE_ROWS` hold the fields of rows of :mod:`benchmarks.kernels.run`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.common import row_arguments
from fla_longhorn.ops.triton.exact.backward import backward_tile, chunk_longhorn_exact_bwd_kernel
from fla_longhorn.ops.triton.exact.backward_qk import (
    chunk_longhorn_exact_bwd_kernel_qk,
    products_tile,
    span_size,
    state_parts,
)
from fla_longhorn.ops.triton.exact.common import CHUNK_SIZE, state_tile
from fla_longhorn.ops.triton.exact.forward import chunk_longhorn_exact_fwd_kernel_o, forward_tile
from fla_longhorn.ops.triton.exact.gram import chunk_longhorn_exact_kernel_gram
from fla_longhorn.ops.triton.exact.recurrent import fused_recurrent_longhorn_exact_fwd_kernel, recurrent_tile
from fla_longhorn.ops.triton.exact.replay import chunk_longhorn_exact_bwd_kernel_replay, replay_tile
from offgpu.compiled import Compiled

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
    K: int
    dtype: str
    kernel: object
    types: dict[str, str]
    constants: dict[str, object]
    num_warps: int
    work: float


def exact_kernel(name: str, K: int, dtype: str = 'bf16', target: str = 'sm_90', **flags: bool) -> ExactKernel:
    """`name`: fwd, recurrent, gram, replay, bwd or qk, with the flags that are not False."""
    precision = 'ieee' if dtype == 'fp16' and target == 'gfx942' else PRECISIONS[dtype]
    operand = '*bf16' if precision == 'bf16' else '*fp32'
    capability = int(target[3:]) // 10 if target.startswith('sm_') else 0
    x = '*' + dtype
    inputs = {'q': x, 'k': x, 'v': x, 'beta': x}
    flags = {flag: flags.get(flag, False) for flag in (*OPTIONS, *PLAIN)}
    constants = dict(
        H=1, K=K, V=V, BT=CHUNK_SIZE, BK=state_tile(K), INTERVAL=checkpoint_interval(K), SPAN=span_size(K, precision),
        PARTS=state_parts(K, precision), DOT=precision, s_q=K, s_k=K, s_v=V, s_z=V, S_Q=K, S_K=K, S_V=V,
        S_B=1 if flags['SCALAR_BETA'] else V, S_Z=V, S_DO=V, S_DY=V, OUTPUT=True, BY_INTERVAL=False,
        **row_arguments(None, K * V), **flags,
    )
    if name == 'fwd':
        kernel, tile = chunk_longhorn_exact_fwd_kernel_o, forward_tile(K, precision, capability)
        types = inputs | {'g': '*fp32', 'a': operand, 'o': x, 'scale': 'fp32', 'T': 'i32', 'N': 'i32'}
    elif name == 'recurrent':
        kernel, tile = fused_recurrent_longhorn_exact_fwd_kernel, recurrent_tile(K)
        types = inputs | {'o': x, 'scale': 'fp32', 'T': 'i32'}
    elif name == 'replay':
        kernel, tile = chunk_longhorn_exact_bwd_kernel_replay, replay_tile(K, precision, capability)
        types = inputs | {'do': x, 'cs': '*fp32', 'a': operand, 'us': operand, 'hs': operand, 'dy': operand, 'scale': 'fp32'}
        types |= {'g': '*fp32', 'states': '*fp32', 'T': 'i32', 'N': 'i32'}
    elif name == 'bwd':
        kernel, tile = chunk_longhorn_exact_bwd_kernel, backward_tile(K, precision, capability)
        types = inputs | dict.fromkeys(('dy', 'dv', 'dbeta'), x) | dict.fromkeys(('a', 'ws', 'dhs'), operand)
        types |= {'cs': operand if flags['USE_BETA_SIGMOID'] else '*fp32', 'g': '*fp32', 'scale': 'fp32', 'T': 'i32'}
        constants['STORE_W'] = operand != x or flags['HAS_D'] or flags['SCALAR_BETA']
    elif name == 'gram':
        kernel, tile = chunk_longhorn_exact_kernel_gram, {'num_warps': 1}
        types = {'q': x, 'k': x, 'g': '*fp32', 'a': operand, 'scale': 'fp32', 'T': 'i32', 'N': 'i32'}
    else:
        kernel, tile = chunk_longhorn_exact_bwd_kernel_qk, products_tile(K, precision, capability)
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
    constants.pop('num_stages', None)
    arguments = argument_names(kernel)
    types = {n: t for n, t in types.items() if n in arguments}
    constants = {n: c for n, c in constants.items() if n in arguments and n not in types}
    work = constants.get('BT', 1) * constants.get('BV', 0) / (32 * num_warps)
    if name == 'qk':
        # programs for parts of the keys
        work *= constants['BK'] / state_tile(K)
    return ExactKernel(name, K, dtype, kernel, types, constants, num_warps, work)


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


def table_row(name: str, label: str, direction: str, **flags: bool) -> tuple:
    """(kernel, update, direction, function, arguments, cost), the fields of a row of `benchmarks.kernels.run`."""
    def arguments(K: int, dtype: str, target: str) -> tuple[dict, dict, int]:
        row = exact_kernel(name, K, dtype, target, **flags)
        return row.types, row.constants, row.num_warps

    def cost(compiled: Compiled, K: int, dtype: str) -> float | None:
        instructions = instructions_per_token_channel(exact_kernel(name, K, dtype, **flags), compiled)
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
