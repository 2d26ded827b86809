"""Checks launches without a GPU: calls the Triton backend as the operators do, on meta tensors.

    python -m benchmarks launches [--target sm_90] [--depth code] [--calls options] [--workers 2]

`offgpu/launches.py` says what is checked at which depth. Prints one line of JSON per call of the op; a failed one has an
`error`.

Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import torch

from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton import backward_summary, forward_summary, longhorn_bwd, longhorn_fwd
from offgpu.absent_device import TARGETS
from offgpu.launches import DEPTHS, rehearsal


@dataclass(frozen=True)
class Call:
    """A call of the op; `mode` says which pass or operator, `layout` the strides of v, z, q and k."""

    mode: str = 'train'
    exact: bool = False
    B: int = 1
    T: int = 100
    H: int = 1
    K: int = 16
    V: int = 64
    N: int | None = None
    dtype: str = 'bfloat16'
    index: str = 'int64'
    layout: str = 'dense'
    scalar_beta: bool = False
    sigmoid: bool = False
    D: bool = False
    z: bool = False
    initial_state: bool = False
    final_state: bool = False
    state_v_first: bool = False
    scale: float = 1.0
    allow_neg_eigval: bool = False

    def __str__(self) -> str:
        default = Call()
        parts = [f'{name}={x}' for name, x in vars(self).items() if x != getattr(default, name)]
        return ' '.join(parts) or 'default'


def empty(*shape: int, dtype: torch.dtype, layout: str = 'dense') -> torch.Tensor:
    """A meta tensor: dense, a slice of a wider projection's channels (`view`), or not aligned to 16 bytes (`shifted`)."""
    if layout == 'view':
        return torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype, device='meta')[..., shape[-1]:]
    if layout == 'shifted':
        return torch.empty(math.prod(shape) + 1, dtype=dtype, device='meta')[1:].view(shape)
    return torch.empty(shape, dtype=dtype, device='meta')


def rehearse(call: Call) -> None:
    """Launch all kernels of a call: the forward, and with `train` the backward."""
    B, T, H, K, V = call.B, call.T, call.H, call.K, call.V
    mixed = call.dtype == 'mixed'
    dtype = torch.bfloat16 if mixed else getattr(torch, call.dtype)
    N = B if call.N is None else call.N
    q, k = (empty(B, T, H, K, dtype=torch.float16 if mixed and x == 'k' else dtype, layout=call.layout) for x in 'qk')
    v, z = (empty(B, T, H, V, dtype=torch.float32 if mixed and x == 'v' else dtype, layout=call.layout) for x in 'vz')
    z = z if call.z else None
    beta = empty(*((B, T, H) if call.scalar_beta else (B, T, H, V)), dtype=dtype)
    D = empty(H, V, dtype=torch.float32 if mixed else dtype) if call.D else None
    state = empty(*((N, H, V, K) if call.state_v_first else (N, H, K, V)), dtype=torch.float32)
    cu_seqlens = None if call.N is None else empty(N + 1, dtype=getattr(torch, call.index))
    pooled, train = call.mode.startswith('pool'), call.mode in ('train', 'train recurrent')
    update, parallel = call.mode == 'update', call.mode in ('train', 'infer', 'pool')
    pool = None
    if pooled:
        # pages larger than a state
        page = empty(N + 3, state[0].numel() + 64, dtype=torch.float32)
        first, last = (empty(N, dtype=getattr(torch, call.index)) for _ in range(2))
        pool = Pool(page[:, 64:].unflatten(1, state.shape[1:]), first, last, empty(N, dtype=torch.bool))
    args = Arguments(
        q, k, v, beta, call.scale, state if not pooled and (call.initial_state or update) else None,
        call.final_state or update or pooled, call.exact, D, z, call.sigmoid, call.state_v_first, cu_seqlens,
        call.allow_neg_eigval,
    )
    if call.mode == 'summary':
        forward_summary(args)
        backward_summary(v, args)
        return
    o, _, states = longhorn_fwd(
        args, save_states=train, parallel=parallel, final_state=state if update else None, pool=pool,
    )
    if train:
        # the gradient of a sum is one number, expanded
        do = torch.empty((), dtype=o.dtype, device='meta').expand(o.shape) if call.layout == 'view' else torch.empty_like(o)
        longhorn_bwd(do, torch.empty_like(state) if call.final_state else None, states, args, parallel=parallel)


FACTORS = {
    'mode': ('train', 'infer', 'train recurrent', 'update', 'pool', 'pool recurrent', 'summary'),
    'exact': (False, True),
    'shape': ((2, 1), (3, 100), (1, 8192)),
    'H': (1, 3),
    'K': (1, 3, 16, 17, 32, 64, 100, 128, 256),
    'V': (1, 33, 64, 130, 768),
    'packed': (None, 'int32', 'int64'),
    'dtype': ('bfloat16', 'float16', 'float32', 'mixed'),
    'layout': ('dense', 'view', 'shifted'),
    'scale': (1.0, 0.25),
    **dict.fromkeys((
        'scalar_beta', 'sigmoid', 'D', 'z', 'initial_state', 'final_state', 'state_v_first', 'allow_neg_eigval',
    ), (False, True)),
}


def pairwise(factors: dict[str, tuple], seed: int = 0) -> list[dict]:
    """Rows that cover all pairs of values of two factors, chosen greedily among random rows; the first cover most."""
    names, generator = list(factors), random.Random(seed)
    left = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    rows = []
    while left:
        a, x, b, y = min(left, key=str)
        best, covered = None, set()
        for _ in range(60):
            row = {name: generator.choice(values) for name, values in factors.items()} | {a: x, b: y}
            pairs = {(c, row[c], d, row[d]) for c, d in itertools.combinations(names, 2)} & left
            if len(pairs) > len(covered):
                best, covered = row, pairs
        rows.append(best)
        left -= covered
    return rows


def option_calls() -> list[Call]:
    """All pairs of options."""
    calls = []
    for row in pairwise(FACTORS):
        (B, T), packed = row.pop('shape'), row.pop('packed')
        if row['mode'] == 'summary':
            # one sequence, diagonal update
            B, packed, row['exact'] = 1, None, False
        if packed:
            B, row = 1, row | {'N': 3, 'index': packed}
        calls.append(Call(B=B, T=T, **row))
    return calls


def size_calls(exact: bool) -> list[Call]:
    """Shapes at which a grid or an integer may overflow."""
    everything = dict(exact=exact, D=True, z=True, initial_state=True, final_state=True)
    calls = [
        Call(**everything, **shape) for shape in (
            dict(T=131072, V=4096),
            dict(T=2**24, V=64),
            dict(T=2**21, K=4, V=64),
            dict(B=4096, T=2048, V=4096),
            dict(B=64, T=8192, V=8192),
            dict(B=2**17, T=16, V=64),
            dict(T=2**20, N=100_000, V=4096, dtype='float32'),
            dict(T=16, H=70_000, V=1),
            dict(T=16, V=2**21),
            dict(mode='train recurrent', B=70_000, T=3, V=4096),
            dict(mode='train recurrent', T=2**20, N=100_000, K=256, V=512),
            dict(mode='update', B=70_000, T=1, V=4096),
            dict(mode='update', T=70_000, N=70_000, V=4096),
            dict(mode='pool recurrent', B=70_000, T=1, K=128, V=4096),
        )
    ]
    return calls if exact else [*calls, Call(mode='summary', T=2**24, V=4096)]


def few_calls() -> list[Call]:
    """Every kernel once: as the layer calls the op, and with many options."""
    layer = dict(T=8192, V=1536, layout='view', sigmoid=True, D=True, z=True)
    other = dict(K=17, V=33, H=3, N=3, dtype='mixed', layout='shifted', scalar_beta=True, initial_state=True)
    step = dict(mode='update', B=3, T=1, state_v_first=True, sigmoid=True, D=True, z=True)
    return [
        Call(exact=True, **layer), Call(**other), Call(**step), Call(exact=True, **step),
        Call(**step | {'mode': 'pool'}), Call(**step | {'mode': 'pool recurrent', 'exact': True}),
        Call(mode='summary', T=8192, z=True, sigmoid=True),
    ]


CALLS = {
    'options': option_calls, 'sizes': partial(size_calls, False), 'exact sizes': partial(size_calls, True), 'few': few_calls,
}


@dataclass
class Outcome:
    call: str
    target: str
    seconds: float = 0.0
    error: str | None = None
    launches: list[dict] = field(default_factory=list)


def run_call(call: Call, target: str, depth: str) -> Outcome:
    outcome, started = Outcome(str(call), target), time.perf_counter()
    with rehearsal(target, depth) as launches:
        try:
            rehearse(call)
        except Exception as error:
            cause = error.__cause__ or error
            outcome.error = f'{type(error).__name__} after {[x.kernel for x in launches]}: {error} {cause}'.strip()[:2000]
        outcome.launches, outcome.seconds = [x.described() for x in launches], round(time.perf_counter() - started, 2)
    return outcome


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks launches', description=__doc__.splitlines()[0])
    parser.add_argument('--target', choices=list(TARGETS), default='sm_90')
    parser.add_argument('--depth', choices=DEPTHS, default='code')
    parser.add_argument('--calls', choices=list(CALLS), default='options', help='pairs of options, large sizes, or a few')
    parser.add_argument('--workers', type=int, default=1, help='processes')
    options = parser.parse_args(args)
    failed = 0
    with ProcessPoolExecutor(options.workers, mp_context=get_context('spawn')) as pool:
        calls = CALLS[options.calls]()
        for outcome in pool.map(run_call, calls, itertools.repeat(options.target), itertools.repeat(options.depth)):
            print(json.dumps(vars(outcome)), flush=True)
            failed += outcome.error is not None
    return 1 if failed else 0
