"""Times on a GPU the passes whose times `predict` predicts: Longhorn's as the layer calls them, and those of fla's operators.

    python -m benchmarks passes [--K 16 64] [--shape 8,2048,4096] [--workers 8] [--compile_seconds 300] [--json FILE]

Medians and quartiles of `triton.testing.do_bench`, between events around one call. A forward saves what its backward reads;
where it takes less than PyTorch needs to launch it, the time is that of the launches. The kernels are compiled first, by
several processes; what is not compiled in time is left out.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from triton.testing import do_bench

from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from fla_longhorn.ops import chunk_longhorn

PEERS = {
    'chunk_gla': 'gla', 'chunk_delta_rule': 'delta_rule', 'chunk_gated_delta_rule': 'gated_delta_rule', 'chunk_kda': 'kda',
}
NAMES = ('exact', 'diagonal', *PEERS)
Call = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]


def make_call(name: str, K: int, shape: tuple[int, int, int], device: str) -> Call:
    """A forward on random bfloat16 inputs of one head, and its leaves."""
    B, T, V = shape

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    q, k, v = draw(B, T, 1, K), draw(B, T, 1, K), draw(B, T, 1, V)
    if name not in PEERS:
        more = dict(beta=draw(B, T, 1, V), D=draw(1, V), z=draw(B, T, 1, V))
        leaves = [x.requires_grad_() for x in (q, k, v, *more.values())]
        return lambda: chunk_longhorn(q, k, v, **more, exact=name == 'exact', use_beta_sigmoid_in_kernel=True)[0], leaves
    k = F.normalize(k.float(), dim=-1).bfloat16()
    more = {} if name == 'chunk_gla' else dict(beta=draw(B, T, 1).sigmoid())
    if name != 'chunk_delta_rule':
        of_a_head = name == 'chunk_gated_delta_rule'
        more['g'] = F.logsigmoid(torch.randn(B, T, 1, *([] if of_a_head else [K]), device=device))
    operator = getattr(importlib.import_module(f'fla.ops.{PEERS[name]}'), name)
    leaves = [x.requires_grad_() for x in (q, k, v, *more.values())]
    return lambda: operator(q, k, v, **more, scale=1.0)[0], leaves


def compile_once(*call) -> None:
    run, leaves = make_call(*call)
    o = run()
    torch.autograd.grad(o, leaves, torch.ones_like(o))
    torch.cuda.synchronize()


def measure(name: str, K: int, shape: tuple[int, int, int], device: str) -> list[dict]:
    """The forward's row and the backward's."""
    run, leaves = make_call(name, K, shape, device)
    o = run()
    do = torch.randn_like(o)
    rows = []
    for direction, timed in (
        ('fwd', run), ('bwd', lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)),
    ):
        ms, low, high = do_bench(timed, warmup=30, rep=150, quantiles=(0.5, 0.25, 0.75))
        row = dict(zip('BTV', shape, strict=True)) | {'K': K, 'pass': f'{name}_{direction}'}
        row |= {'ms': ms, 'ms_low': low, 'ms_high': high}
        print(f'K = {K} {row["pass"]}: {ms:.4f} ms ({low:.4f} to {high:.4f})', flush=True)
        rows.append(row)
    return rows


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks passes', description=__doc__.splitlines()[0])
    parser.add_argument('--K', nargs='+', type=int, default=[16, 64, 128])
    parser.add_argument('--shape', default='8,2048,4096', help='B,T,V')
    parser.add_argument('--names', nargs='+', choices=NAMES, default=NAMES)
    parser.add_argument('--workers', type=int, default=8, help='processes that compile')
    parser.add_argument('--compile_seconds', type=float, default=300)
    parser.add_argument('--json', metavar='FILE', help='write the figures here')
    options = parser.parse_args(args)
    B, T, V = map(int, options.shape.split(','))
    calls = [(name, K, (B, T, V), 'cuda') for K in options.K for name in options.names]
    with get_context('spawn').Pool(options.workers) as pool:
        results, end = [pool.apply_async(compile_once, call) for call in calls], time.monotonic() + options.compile_seconds
        while not all(result.ready() for result in results) and time.monotonic() < end:
            time.sleep(0.2)
        compiled = [result.ready() for result in results]
    report: dict = {'machine': describe_machine(torch.device('cuda')), 'rows': [], 'not_run': {}}
    for call, ready in zip(calls, compiled, strict=True):
        label = f'{call[0]}, K = {call[1]}'
        if not ready:
            report['not_run'][label] = f'not compiled after {options.compile_seconds:.0f} s'
            continue
        try:
            report['rows'] += measure(*call)
        except Exception as error:  # another package's operator may raise any error for a shape
            report['not_run'][label] = timing.describe_error(error)
        if options.json:
            timing.write_report(report, options.json)
