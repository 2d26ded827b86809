"""The argument checks of every op, with errors that name the argument, what is wanted and what it got."""

from __future__ import annotations

import numbers
import os
from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import is_fake

from fla_longhorn.ops.arguments import FLAGS, Arguments
from fla_longhorn.ops.last_read import last_read
from fla_longhorn.ops.pool import Pool, list_rows

MAX_STATE_SIZE = 256
# if 1, values on a device are compared too, which synchronises at each call
CHECK_VALUES = 'FLA_LONGHORN_CHECK_VALUES'
LOW_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32)


def check_inputs(
    args: Arguments, cu_seqlens_cpu: torch.Tensor | None, *, allow_float64: bool = False, cu_seqlens_name: str = 'cu_seqlens',
) -> None:
    """Raise `ValueError` (shape, device, boundaries) or `TypeError` (type, dtype) unless the arguments fit together.

    `cu_seqlens_name` is the name of `cu_seqlens` in messages.
    """
    q, k, v, beta, D, z, cu_seqlens = args.q, args.k, args.v, args.beta, args.D, args.z, args.cu_seqlens
    tensors = {'q': q, 'k': k, 'v': v, 'beta': beta, 'D': D, 'z': z, 'initial_state': args.initial_state, 'g': args.g}
    for name, x in tensors.items():
        if x is not None or name not in ('D', 'z', 'initial_state', 'g'):
            check_tensor(name, x, q, allow_float64)
    if isinstance(args.scale, bool) or not isinstance(args.scale, (numbers.Real, torch.SymFloat)):
        raise TypeError(f'scale must be a number or None, got {type(args.scale).__name__}')
    for name in FLAGS:
        if not isinstance(getattr(args, name), bool):
            raise TypeError(f'{name} must be True or False, got {type(getattr(args, name)).__name__}')

    if q.dim() != 4:
        raise ValueError(f'q must have shape [B, T, H, K], got {list(q.shape)}')
    B, T, H, K = q.shape
    # one by one: min() would make the sizes of an exported program depend on each other
    if B < 1 or T < 1 or H < 1 or K < 1:
        raise ValueError(f'q must have at least one sequence, token, head and state entry, got {list(q.shape)}')
    if K > MAX_STATE_SIZE:
        raise ValueError(f'q must have a state size K of at most {MAX_STATE_SIZE}, got {K}')
    check_shape('k', k, (B, T, H, K), '[B, T, H, K], the shape of q')
    if v.dim() != 4 or v.shape[:3] != q.shape[:3] or v.shape[3] < 1:
        raise ValueError(f'v must have shape [B, T, H, V] = [{B}, {T}, {H}, V >= 1], got {list(v.shape)}')
    V = v.shape[-1]
    for name, x, what in (('beta', beta, 'step'), ('g', args.g, 'decay')):
        if x is not None and x.dim() == 3:
            check_shape(name, x, (B, T, H), f'[B, T, H] (one {what} per head) or [B, T, H, V] (one per channel)')
        elif x is not None:
            check_shape(name, x, (B, T, H, V), f'[B, T, H, V] (one {what} per channel) or [B, T, H] (one per head)')
    if D is not None:
        check_shape('D', D, (H, V), '[H, V]')
    if z is not None:
        check_shape('z', z, (B, T, H, V), '[B, T, H, V], the shape of v')

    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, cu_seqlens_cpu, B, T, q.device, cu_seqlens_name)
    elif cu_seqlens_cpu is not None:
        raise ValueError('cu_seqlens_cpu is the host copy of cu_seqlens and needs cu_seqlens beside it, got None')
    if args.initial_state is not None:
        _check_state_shape('initial_state', args.initial_state, args)


def check_pool(pool: Pool, args: Arguments) -> None:
    """Raise unless the states can be updated in place and the indices have the right type, shape and device."""
    state: object = pool.states
    if not isinstance(state, torch.Tensor):
        raise TypeError(f'state must be a torch.Tensor, got {type(state).__name__}')
    if state.dtype != torch.float32:
        raise TypeError(f'state must be float32 to be updated in place, got {state.dtype}')
    check_tensor('state', state, args.q, False)
    _check_state_shape('state', state, args, pooled=pool.state_indices is not None)
    # torch.compile cannot trace `is_neg`
    if not torch.compiler.is_compiling() and state.is_neg():
        raise ValueError('state must not be a negative view to be updated in place: give state.resolve_neg()')
    row = state[0]
    size = row.numel()
    if not row.is_contiguous() or (state.shape[0] > 1 and state.stride(0) < size):
        raise ValueError(
            f'state must have contiguous rows, {size} or more elements apart, to be updated in place, '
            f'got strides {state.stride()}'
        )
    if pool.final_state_indices is not None and pool.state_indices is None:
        raise ValueError('final_state_indices needs state_indices beside it, got None')
    if isinstance(pool.pad_slot_id, bool) or not isinstance(pool.pad_slot_id, (int, torch.SymInt)):
        raise TypeError(f'pad_slot_id must be an integer, got {type(pool.pad_slot_id).__name__}')
    for name, x in pool.choices.items():
        if x is None:
            continue
        dtypes = (torch.bool,) if name == 'has_initial_state' else (torch.int32, torch.int64)
        if not isinstance(x, torch.Tensor) or x.dtype not in dtypes:
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            wanted = ' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)
            raise TypeError(f'{name} must be a tensor of {wanted}, got {got}')
        if x.device != args.q.device:
            raise ValueError(f'{name} must be on the device of q ({args.q.device}), got {x.device}')
        check_shape(name, x, (args.num_sequences,), '[N], one entry per sequence')


def check_rows(pool: Pool, N: int) -> None:
    """Raise if a row is outside the pool, or one sequence writes a row that another reads or writes."""
    _check_rows(len(pool.states), N, pool.pad_slot_id, *pool.read())


@lru_cache(maxsize=64)
def _check_rows(
    P: int, N: int, pad_slot_id: int, named: tuple | None, final: tuple | None, filled: tuple | None,
) -> None:
    for name, indices in (('state_indices', named), ('final_state_indices', final)):
        highest = max([row for row in indices or () if row != pad_slot_id], default=-1)
        if highest >= P:
            raise ValueError(f'{name} must be below the number of states in the pool, {P}, got {highest}')
    rows = list_rows(N, pad_slot_id, named, final, filled)
    writers = {after: n for n, (_, after, _) in enumerate(rows) if after >= 0}
    name = 'state_indices' if final is None else 'final_state_indices'
    for n, (before, after, _) in enumerate(rows):
        if after >= 0 and writers[after] != n:
            raise ValueError(f'{name} must not name a row twice, got {after} for sequences {n} and {writers[after]}')
        if final is not None and before >= 0 and writers.get(before, n) != n:
            raise ValueError(
                f'{name} must not name a row that another sequence starts from, got {before} for sequence {writers[before]}, '
                f'from which sequence {n} starts'
            )


def check_cu_seqlens(
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, B: int, T: int, device: torch.device,
    cu: str = 'cu_seqlens',
) -> None:
    """Raise unless the boundaries are `0 = c_0 <= c_1 <= ... <= c_N = T` and B == 1; `cu` is their name in messages."""
    check_cu_seqlens_layout(cu_seqlens, cu_seqlens_cpu, B, device, cu)
    # the values of a traced or captured tensor can't be read
    if torch.compiler.is_compiling() or is_capturing(device):
        return
    if cu_seqlens_cpu is not None and (device.type == 'cpu' or os.environ.get(CHECK_VALUES) == '1'):
        if not torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu):
            raise ValueError(f'{cu}_cpu must be the host copy of {cu} ({cu_seqlens.tolist()}), got {cu_seqlens_cpu.tolist()}')
    check_boundaries(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, T, cu)


def check_cu_seqlens_layout(
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, B: int, device: torch.device, cu: str = 'cu_seqlens',
) -> None:
    """Check types, shapes and devices, but no values."""
    if B != 1:
        raise ValueError(f'{cu} packs all sequences into one row, so q must have B = 1, got B = {B}')
    for name, x in ((cu, cu_seqlens), (f'{cu}_cpu', cu_seqlens_cpu)):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor) or x.dtype not in (torch.int32, torch.int64):
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f'{name} must be an int32 or int64 tensor, got {got}')
        if x.dim() != 1 or x.shape[0] < 2:
            raise ValueError(f'{name} must have shape [N + 1] with N >= 1 sequences, got {list(x.shape)}')
    if cu_seqlens.device != device:
        raise ValueError(f'{cu} must be on the device of q ({device}), got {cu_seqlens.device}')
    if cu_seqlens_cpu is not None and (cu_seqlens_cpu.device.type != 'cpu' or cu_seqlens_cpu.shape != cu_seqlens.shape):
        raise ValueError(
            f'{cu}_cpu must be the host copy of {cu}, of shape {list(cu_seqlens.shape)} on the CPU, '
            f'got {list(cu_seqlens_cpu.shape)} on {cu_seqlens_cpu.device}'
        )


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on `device`, so that no value can be read from it."""
    return device.type == 'cuda' and torch.cuda.is_current_stream_capturing()


def check_boundaries(cu_seqlens: torch.Tensor, T: int, cu: str = 'cu_seqlens') -> None:
    """Raise unless the values go from 0 to T without decreasing."""
    if cu_seqlens.is_meta or is_fake(cu_seqlens):
        raise ValueError(f'{cu} must have values, got a fake or meta tensor: call without it, for one sequence of {T} tokens')
    bounds = last_read.values(cu_seqlens)
    if bounds[0] != 0:
        raise ValueError(f'{cu} must start at 0, got {bounds[0]}')
    if bounds[-1] != T:
        raise ValueError(f'{cu} must end at the number of tokens T = {T}, got {bounds[-1]}')
    drop = next((i for i, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)) if b < a), None)
    if drop is not None:
        raise ValueError(f'{cu} must not decrease, got {bounds[drop]} followed by {bounds[drop + 1]} at index {drop}')


def check_tensor(name: str, x: object, q: torch.Tensor, allow_float64: bool) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f'{name} must be a torch.Tensor, got {type(x).__name__}')
    if x.dtype not in LOW_PRECISIONS and not (allow_float64 and x.dtype == torch.float64):
        got = 'float64, which naive_recurrent_longhorn takes' if x.dtype == torch.float64 else x.dtype
        raise TypeError(f'{name} must be float16, bfloat16 or float32, got {got}')
    if x.device != q.device:
        raise ValueError(f'{name} must be on the device of q ({q.device}), got {x.device}')


def _check_state_shape(name: str, x: torch.Tensor, args: Arguments, pooled: bool = False) -> None:
    count, meaning = ('P', 'a pool of P states') if pooled else ('N', 'one state per sequence')
    layout = f'[{count}, H, V, K] (state_v_first=True)' if args.state_v_first else f'[{count}, H, K, V]'
    wanted = args.state_shape
    if pooled and x.dim() == 4 and x.shape[0] > 0:
        wanted = (x.shape[0], *wanted[1:])
    check_shape(name, x, wanted, f'{layout}, {meaning}')


def check_shape(name: str, x: torch.Tensor, wanted: tuple[int, ...], meaning: str) -> None:
    if x.shape != wanted:
        raise ValueError(f'{name} must have shape {meaning}, here {list(wanted)}, got {list(x.shape)}')
