"""Each argument of each compiled loop one too short, absent, of another dtype or freed, before a page that may not be read.

Run by `test_arguments`. Prints a line of JSON per loop, which has a process of its own: what calls it, how many cases there
were, those that went wrong and, if the process died, the case in which it did.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterator

import torch

import fla_longhorn  # noqa: F401  registers
from fla_cpu import loops
from fla_kit.numba.cache import DiskCache
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool
from fla_longhorn_cpu import backend, backward, forward, mixer
from fla_longhorn_cpu.token import Mixer, mix_tokens

B, T, H, K, V, P, R = 2, 5, 2, 5, 24, 3, 3
D = H * V
LIBC = ctypes.CDLL(None)
KEPT: list[mmap.mmap] = []


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` that ends where a page begins that may not be read."""
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    KEPT.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert LIBC.mprotect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    if not size:
        return x.clone()
    place = (ctypes.c_char * size).from_address(start + pages * mmap.PAGESIZE - size)
    return torch.frombuffer(place, dtype=x.dtype).view(x.shape).copy_(x)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def operator(*, backward: bool = False, pool: bool = False, **given):
    rows = {name: given.pop(name) for name in ('state_indices', 'final_state_indices', 'has_initial_state') if name in given}
    outputs = {name: given.pop(name) for name in ('do', 'dht', 'states', 'final_state', 'state') if name in given}
    args = Arguments(**given, use_beta_sigmoid_in_kernel=True)
    if backward:
        # only whether there is one is asked
        args = args._replace(initial_state=outputs['dht'])
        return backend.longhorn_bwd(outputs['do'], outputs['dht'], outputs['states'], args, parallel=True)
    pool = Pool(outputs['state'], **rows) if pool else None
    return backend.longhorn_fwd(args, save_states=False, parallel=True, final_state=outputs.get('final_state'), pool=pool)


def inputs(T: int, beta: bool = True) -> dict[str, torch.Tensor]:
    step = (B, T, H, V) if beta else (B, T, H)
    return dict(
        q=randn(B, T, H, K), k=randn(B, T, H, K), v=randn(B, T, H, V), beta=randn(*step), D=randn(H, V), z=randn(B, T, H, V),
        g=-torch.rand(step),
    )


def packed() -> dict[str, torch.Tensor]:
    return {**{name: x if name == 'D' else x[:1] for name, x in inputs(9).items()}, 'cu_seqlens': ints(0, 4, 9)}


def decode(*, pages: bool = False, **given):
    x, z, memory, state = (given.pop(name) for name in ('x', 'z', 'memory', 'state'))
    rows = {name: given.pop(name) for name in ('state_indices', 'final_state_indices') if name in given}
    gate = tuple(given.pop(name) for name in ('down', 'up', 'A_log', 'dt_bias'))
    parts = Mixer(**given, num_heads=H, state_size=K, exact=False, allow_neg_eigval=False, key_eps=None, gate=gate)
    return mix_tokens(x, z, parts, memory, Pool(state, **rows))


def weights() -> dict[str, torch.Tensor]:
    return dict(
        x=randn(B, 1, D), z=randn(B, 1, D), taps=randn(D, 1, 4), conv_bias=randn(D), x_weight=randn(R + 2 * H * K, D),
        beta_weight=randn(D, R), beta_bias=randn(D), D=randn(D), down=randn(R, D), up=randn(H, R), A_log=randn(H),
        dt_bias=randn(H),
    )


STATE, POOL, ROWS = (B, H, K, V), (P, H, K, V), dict(state_indices=ints(2, 0), final_state_indices=ints(1, 0))
STATES = dict(initial_state=randn(*STATE), final_state=randn(*STATE))
OPTIONAL = 'D z g initial_state final_state dht state_indices final_state_indices'
# what runs a loop, its tensors, and which of them may be absent
CALLS = {
    'rms_norm': (
        lambda x, weight, rstd: loops.rms_norm(x, weight, 1e-5, None, rstd),
        dict(x=randn(3, 22), weight=randn(22), rstd=randn(3)), 'weight rstd',
    ),
    'convolve_token': (
        lambda **given: loops.convolve_token(**given, swish=True),
        dict(x=randn(3, 22), cache=randn(3, 22, 4), weight=randn(22, 4), bias=randn(22)), 'bias',
    ),
    'convolve': (
        lambda **given: loops.convolve(**given, swish=True),
        dict(x=randn(1, 9, 32), weight=randn(32, 4), bias=randn(32), cu_seqlens=ints(0, 4, 9)), 'bias cu_seqlens',
    ),
    'convolve_in_pages': (
        lambda **given: loops.convolve_in_pages(**given, swish=True, first_pages=[2, 0], last_pages=[1, 0]),
        dict(x=randn(9, 32), pages=randn(3, 3, 32), weight=randn(32, 4), bias=randn(32), cu_seqlens=ints(0, 4, 9)), 'bias',
    ),
    'convolve_gradients': (
        lambda **given: loops.convolve_gradients(**given, swish=True),
        dict(dy=randn(1, 9, 32), x=randn(1, 9, 32), weight=randn(32, 4), bias=randn(32), cu_seqlens=ints(0, 4, 9)),
        'bias cu_seqlens',
    ),
    'forward': (operator, inputs(T) | STATES, OPTIONAL),
    'forward, a beta per head': (operator, inputs(T, False) | dict(initial_state=randn(*STATE)), OPTIONAL),
    'forward, packed': (operator, packed() | dict(initial_state=randn(*STATE)), OPTIONAL),
    'forward, pool': (
        lambda **given: operator(**given, pool=True), inputs(T) | dict(state=randn(*POOL)) | ROWS, OPTIONAL,
    ),
    'token': (operator, inputs(1) | STATES, OPTIONAL),
    'token, pool': (
        lambda **given: operator(**given, pool=True), inputs(1) | dict(state=randn(*POOL)) | ROWS, OPTIONAL,
    ),
    'backward': (
        lambda **given: operator(**given, backward=True),
        inputs(T) | dict(do=randn(B, T, H, V), dht=randn(*STATE), states=randn(B, H, K, V)),
        OPTIONAL,
    ),
    'backward, a beta per head': (
        lambda **given: operator(**given, backward=True),
        inputs(T, False) | dict(do=randn(B, T, H, V), dht=randn(*STATE), states=randn(B, H, K, V)),
        OPTIONAL,
    ),
    'mix': (decode, weights() | dict(memory=randn(B, D, 4), state=randn(*STATE)), 'conv_bias'),
    'mix, pool': (
        decode, weights() | dict(memory=randn(P, 3, D), state=randn(*POOL)) | ROWS, 'conv_bias final_state_indices',
    ),
}
CHANGES = {
    'short': lambda x: guarded(x[..., :-1]),
    'fewer': lambda x: guarded(x[:-1]),
    'absent': lambda x: None,
    'dtype': lambda x: guarded(x.to(torch.float16 if x.is_floating_point() else torch.float32)),
    'freed': lambda x: freed(x),
}


def freed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def values(result) -> list[torch.Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [x.float() for x in results if x is not None]


def outcome(function, given: dict, change: str, may_be_absent: bool, expected: list[torch.Tensor]) -> str:
    """What is wrong, if anything."""
    try:
        result = function(**given)
    except Exception:
        return ''
    # left to others
    if result is None or (change == 'absent' and may_be_absent):
        return ''
    if change in ('dtype', 'sound') and all(map(near, values(result), expected)):
        return ''
    return 'returned values'


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.02, atol=0.02)


def cases(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, dict[str, torch.Tensor | None]]]:
    yield '', 'sound', {name: guarded(x) for name, x in tensors.items()}
    for name, x in tensors.items():
        for change, apply in CHANGES.items():
            yield name, change, {other: guarded(y) for other, y in tensors.items()} | {name: apply(x)}


def in_a_process(function, tensors: dict[str, torch.Tensor], optional: list[str]) -> tuple[int, list[str], str]:
    """The number of cases, those that went wrong, and the one in which the process died."""
    expected = values(function(**{name: x.clone() for name, x in tensors.items()}))
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        for name, change, given in cases(tensors):
            os.write(writes, f'{name} {change}'.encode())
            os.write(writes, f': {outcome(function, given, change, name in optional, expected)}\n'.encode())
            KEPT.clear()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, 'rb') as file:
        lines = file.read().decode().split('\n')
    died = os.waitpid(pid, 0)[1]
    return len(lines) - 1, [line for line in lines if not line.endswith(': ')][:-1], lines[-1] if died else ''


if __name__ == '__main__':
    with torch.no_grad():
        for call, (function, tensors, optional) in CALLS.items():
            print(json.dumps([call, *in_a_process(function, tensors, optional.split())]))
    loops_of = (x for module in (loops, forward, backward, mixer) for x in vars(module).values())
    print(json.dumps([x.__name__ for x in loops_of if isinstance(getattr(x, '_cache', None), DiskCache) and not x.overloads]))
