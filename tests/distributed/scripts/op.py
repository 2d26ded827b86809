"""The op on four ranks and on two pairs of them: writes the relative errors of each case to the file it is given.

    python -m tests.distributed.scripts.op NUMBER_OF_RANKS FILE

The reference is the naive op on one rank in float64, on the very numbers that the ranks were given.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from fla.ops.cp import build_cp_context

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.diagonal import segments
from offgpu.interpreter import make_faster
from tests.distributed.scripts.launch import fork
from tests.ops.cases import Case, make_inputs, relative_error

ALL = dict(D=True, z=True, sigmoid=True, scale=0.3)


@dataclass
class Job:
    """A case, and what runs it."""

    case: Case
    backend: str = 'numba'
    # of the Triton backend, if not by its own rule
    segment_length: int | None = None
    op: Callable = chunk_longhorn
    # exact or not
    updates: tuple[bool, ...] = (False, True)


def jobs(size: int) -> dict[str, Job]:
    """Cases by name, for `size` ranks of 12 tokens each unless it says otherwise."""
    T = 12 * size
    plain, full = Case(H=2, K=5, V=7), Case(H=2, K=3, V=6, **ALL)
    cases = {
        'whole': Job(plain.packed(T)),
        'whole, all options': Job(full.packed(T)),
        'boundaries inside': Job(full.packed(5, 4, T - 20, 11)),
        'boundaries on the edges': Job(plain.packed(*[12] * size)),
        'one edge, and inside': Job(full.packed(12, T - 19, 7)),
        'empty sequences': Job(plain.packed(0, 12, 0, T - 15, 3, 0)),
        'one token a rank': Job(full.packed(size)),
        'two tokens a rank': Job(full.packed(1, 2 * size - 2, 1)),
        'past the saved states': Job(Case(H=1, K=4, V=3, D=True).packed(50, 70 * size - 50)),
        'scalar beta': Job(Case(H=2, K=4, V=9, scalar_beta=True, z=True, state_v_first=True).packed(T - 3, 3)),
        'bfloat16': Job(Case(H=1, K=4, V=8, dtype=torch.bfloat16, **ALL).packed(T - 5, 5)),
        'torch': Job(full.packed(5, T - 9, 4), 'torch'),
        'torch, whole': Job(plain.packed(T), 'torch'),
        'recurrent': Job(full.packed(T), op=fused_recurrent_longhorn),
    }
    if size > 2:
        cases['over three ranks'] = Job(full.packed(8, 24, T - 32))
        cases['two over three ranks'] = Job(plain.packed(20, T - 20))
    return cases


def triton_jobs(size: int) -> dict[str, Job]:
    cases = {'triton': Job(Case(H=1, K=3, V=5, **ALL).packed(3, 4 * size - 3), 'triton')}
    if size > 2:
        # the exact update is not cut into segments
        segments = dict(segment_length=checkpoint_interval(2), updates=(False,))
        cases['triton, in segments'] = Job(Case(H=1, K=2, V=3, z=True).packed(36 * size), 'triton', **segments)
        cases['triton, whole'] = Job(Case(H=1, K=3, V=5).packed(4 * size), 'triton')
    return cases


def run(job: Job, exact: bool, group: dist.ProcessGroup, device: str = 'cpu') -> dict[str, torch.Tensor]:
    """This rank's outputs and gradients, on the CPU."""
    os.environ['FLA_LONGHORN_BACKEND'] = job.backend if device == 'cpu' else 'triton'
    if job.segment_length is not None:
        segments.choose_segment_length = lambda *_: job.segment_length
    case, rank, size = job.case, dist.get_rank(group), dist.get_world_size(group)
    t = case.T // size
    mine = slice(rank * t, rank * t + t)
    context = build_cp_context(torch.tensor([0, *case.lengths]).cumsum(0).to(device), group)
    inputs = {
        name: (x if name == 'D' else x[:, mine]).detach().to(device, copy=True).requires_grad_()
        for name, x in make_inputs(case).items()
    }
    o, _ = job.op(**inputs, **options(case, exact), cp_context=context)
    o.backward(output_gradient(case)[:, mine].to(device))
    return {'o': o.detach().cpu(), **{f'd{name}': x.grad.cpu() for name, x in inputs.items()}}


@contextmanager
def traffic() -> Iterator[dict[str, list[int]]]:
    """What the op sends and receives meanwhile: the bytes of each call, by its name."""
    counts: dict[str, list[int]] = {}

    def counted(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            x = args[1] if name == 'all_gather' else args[0]
            counts.setdefault(name, []).append(x.nbytes)
            return function(*args, **kwargs)
        return call

    with ExitStack() as stack:
        for name in ('all_gather', 'isend', 'recv'):
            stack.enter_context(patch.object(dist, name, counted(name, getattr(dist, name))))
        yield counts


def options(case: Case, exact: bool) -> dict:
    return dict(scale=case.scale, use_beta_sigmoid_in_kernel=case.sigmoid, state_v_first=case.state_v_first, exact=exact)


def output_gradient(case: Case) -> torch.Tensor:
    return torch.randn(1, case.T, case.H, case.V, generator=torch.Generator().manual_seed(1)).to(case.dtype)


def key(size: int, exact: bool, name: str) -> str:
    return f'{size} ranks, {"exact" if exact else "diagonal"}, {name}'


def errors(case: Case, exact: bool, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    inputs = {name: x.detach().double().requires_grad_() for name, x in make_inputs(case).items()}
    cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0)
    o, _ = naive_recurrent_longhorn(**inputs, **options(case, exact), cu_seqlens=cu_seqlens)
    o.backward(output_gradient(case).double())
    found = {'o': relative_error(torch.cat([part['o'] for part in parts], 1), o.detach())}
    for name, x in inputs.items():
        grads = [part[f'd{name}'] for part in parts]
        found[f'd{name}'] = relative_error(sum(grads) if name == 'D' else torch.cat(grads, 1), x.grad)
    return found


def main(path: str):
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [(dist.group.WORLD, list(range(size)))]
    pairs = [(dist.new_group([i, i + 1]), [i, i + 1]) for i in range(0, size, 2)]
    groups += [] if size == 2 else pairs
    make_jobs = triton_jobs if os.environ.get('TRITON_INTERPRET') == '1' else jobs

    # all collectives first, then each rank computes the references of some cases
    results, repeats, sent = {}, {}, {}
    for group, members in groups:
        for i, (name, job) in enumerate(make_jobs(len(members)).items()):
            for exact in job.updates:
                # the pairs share the cases for two ranks
                if rank not in members or (len(members) < size and pairs[i % len(pairs)][1] != members):
                    continue
                owner = members[i % len(members)]
                with traffic() as counts:
                    got = run(job, exact, group)
                at = key(len(members), exact, name)
                sent[at] = counts
                if name == 'boundaries inside':
                    again = run(job, exact, group)
                    repeats[at] = all(torch.equal(got[x], again[x]) for x in got)
                parts = [None] * len(members) if rank == owner else None
                dist.gather_object(got, parts, dst=owner, group=group)
                if rank == owner:
                    results[at] = (job.case, exact, parts)
    found = {at: errors(*result) for at, result in results.items()}
    everything = [None] * size if rank == 0 else None
    dist.gather_object((found, repeats, sent), everything)
    if rank == 0:
        with open(path, 'w') as file:
            json.dump({
                'errors': {at: value for found, *_ in everything for at, value in found.items()},
                'repeats': {at: value for _, repeats, _ in everything for at, value in repeats.items()},
                'traffic': [sent for *_, sent in everything],
            }, file)


if __name__ == '__main__':
    make_faster()
    fork(main, int(sys.argv[1]), sys.argv[2])
