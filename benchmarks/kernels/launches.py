"""Checks launches without a GPU: calls the Triton backend as the operators do, on meta tensors.

    python -m benchmarks launches [--target sm_90] [--depth code] [--calls options] [--workers 2]

`offgpu/launches.py` says what is checked at which depth. Prints a line for each call of the op, with the most that one of its
launches requires; `--json FILE` has a line of JSON for each, with every launch.

Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.measure.timing import report_file
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.autograd import new_updates
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.triton import longhorn_bwd, longhorn_fwd
from fla_longhorn.ops.triton.diagonal import summaries as kernels
from fla_longhorn.selfcheck.case import DTYPES, FLAGS, MIXED, Case, make_inputs, make_options
from offgpu.absent_device import TARGETS
from offgpu.launches import DEPTHS, rehearsal


@dataclass(frozen=True)
class Call(Case):
    """A call of the op; `mode` says which pass or operator, `index` is the dtype of `cu_seqlens` and of a pool's rows."""

    B: int = 1
    T: int = 100
    H: int = 1
    V: int = 64
    dtype: torch.dtype = torch.bfloat16
    final_state: bool = False
    scale: float | None = 1.0
    mode: str = 'train'
    exact: bool = False
    index: torch.dtype = torch.int64

    def shared_by(self, N: int) -> Call:
        """N sequences in one row, of which no kernel's launch depends on the lengths."""
        return self.packed(self.T, *[0] * (N - 1))

    def __str__(self) -> str:
        default = Call()
        shown = {name: x for name, x in vars(self).items() if x != getattr(default, name)}
        if self.lengths is not None:
            shown['lengths'] = len(self.lengths)
        return ' '.join(f'{name}={x}' for name, x in shown.items()) or 'default'


def rehearse(call: Call) -> None:
    """Launch all kernels of a call: the forward, and with `train` the backward."""
    pooled, train = call.mode.startswith('pool'), call.mode in ('train', 'train recurrent')
    update, parallel = call.mode == 'update', call.mode in ('train', 'infer', 'pool')
    case = replace(call, initial_state=True, final_state=call.final_state or update or pooled)
    inputs = {name: x.detach() for name, x in make_inputs(case, 'meta').items()}
    args = Arguments(**inputs, **make_options(case, 'meta', call.exact))
    state, N = inputs['initial_state'], args.num_sequences
    if pooled or not (call.initial_state or update):
        args = args._replace(initial_state=None)
    if args.cu_seqlens is not None:
        args = args._replace(cu_seqlens=args.cu_seqlens.to(call.index))
    pool = None
    if pooled:
        # pages larger than a state
        page = torch.empty(N + 3, state[0].numel() + 64, dtype=torch.float32, device='meta')
        first, last = (torch.empty(N, dtype=call.index, device='meta') for _ in range(2))
        used = torch.empty(N, dtype=torch.bool, device='meta')
        pool = Pool(page[:, 64:].unflatten(1, state.shape[1:]), first, last, used)
    if call.mode == 'summary':
        kernels.forward_summary(args)
        kernels.backward_summary(args.v, args)
        return
    us = new_updates(args, save_states=train, parallel=parallel)
    o, _, states = longhorn_fwd(
        args, save_states=train, parallel=parallel, final_state=state if update else None, pool=pool, updates=us,
    )
    if train:
        # the gradient of a sum is one number, expanded
        do = torch.empty((), dtype=o.dtype, device='meta').expand(o.shape) if call.layout == 'view' else torch.empty_like(o)
        longhorn_bwd(do, torch.empty_like(state) if call.final_state else None, states, args, parallel=parallel, updates=us)


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
    'g': (None, 'head', 'channel'),
    **dict.fromkeys(FLAGS, (False, True)),
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
        (B, T), packed, dtype = row.pop('shape'), row.pop('packed'), row.pop('dtype')
        if row['mode'] == 'summary':
            # one sequence, diagonal update
            B, packed, row['exact'] = 1, None, False
        row |= {'dtypes': MIXED} if dtype == 'mixed' else {'dtype': DTYPES[dtype]}
        call = Call(B=B, T=T, **row)
        calls.append(replace(call.shared_by(3), index=getattr(torch, packed)) if packed else call)
    return calls


def size_calls(exact: bool) -> list[Call]:
    """Shapes at which a grid or an integer may overflow."""
    everything = dict(exact=exact, D=True, z=True, initial_state=True, final_state=True)
    many = (2**20, *[0] * 99_999)
    calls = [
        Call(**everything, **shape) for shape in (
            dict(T=131072, V=4096),
            dict(T=2**24, V=64),
            dict(T=2**21, K=4, V=64),
            dict(B=4096, T=2048, V=4096),
            dict(B=64, T=8192, V=8192),
            dict(B=2**17, T=16, V=64),
            dict(T=2**20, lengths=many, V=4096, dtype=torch.float32),
            dict(T=16, H=70_000, V=1),
            dict(T=16, V=2**21),
            dict(mode='train recurrent', B=70_000, T=3, V=4096),
            dict(mode='train recurrent', T=2**20, lengths=many, K=256, V=512),
            dict(mode='update', B=70_000, T=1, V=4096),
            dict(mode='update', T=70_000, lengths=(1,) * 70_000, V=4096),
            dict(mode='pool recurrent', B=70_000, T=1, K=128, V=4096),
        )
    ]
    return calls if exact else [*calls, Call(mode='summary', T=2**24, V=4096)]


def few_calls() -> list[Call]:
    """Every kernel once: as the layer calls the op, and with many options."""
    layer = dict(T=8192, V=1536, layout='view', sigmoid=True, D=True, z=True)
    other = dict(K=17, V=33, H=3, lengths=(50, 0, 50), dtypes=MIXED, layout='shifted', scalar_beta=True, initial_state=True)
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


def line(outcome: Outcome) -> str:
    """The most that one launch of a call requires, or the call's error; registers are known at the depth 'code'."""
    if outcome.error is not None:
        return f'    failed: {outcome.call}: {outcome.error}'
    names = ('registers', 'spills', 'shared')
    registers, spills, shared = (max((x.get(name) or 0 for x in outcome.launches), default=0) for name in names)
    return f'{len(outcome.launches):9}{registers:10}{spills:8}{shared:8}{outcome.seconds:9}  {outcome.call}'


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks launches', description=__doc__.splitlines()[0])
    parser.add_argument('--target', choices=list(TARGETS), default='sm_90')
    parser.add_argument('--depth', choices=DEPTHS, default='code')
    parser.add_argument('--calls', choices=list(CALLS), default='options', help='pairs of options, large sizes, or a few')
    parser.add_argument('--workers', type=int, default=1, help='processes')
    parser.add_argument('--json', type=report_file, metavar='FILE', help='write a line of JSON for each call here')
    options = parser.parse_args(args)
    failed = 0
    print(' launches registers  spills  shared  seconds  call', flush=True)
    if options.json:
        Path(options.json).write_text('')
    with ProcessPoolExecutor(options.workers, mp_context=get_context('spawn')) as pool:
        calls = CALLS[options.calls]()
        for outcome in pool.map(run_call, calls, itertools.repeat(options.target), itertools.repeat(options.depth)):
            print(line(outcome), flush=True)
            if options.json:
                with open(options.json, 'a') as file:
                    file.write(json.dumps(vars(outcome)) + '\n')
            failed += outcome.error is not None
    return 1 if failed else 0
