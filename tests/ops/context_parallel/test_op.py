"""Context parallelism of the ops: two and four ranks against one, and the calls that it refuses.

`python -m tests.ops.context_parallel.test_op` is what four ranks and two pairs of them run: what differs is an
error. The reference is the naive op in float64, on the very numbers that the ranks were given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fla.ops.cp import FLACPContext, build_cp_context

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.diagonal import segments
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from tests import forks
from tests.devices import hasten_interpreter
from tests.ops.cases import assert_close
from tests.ranks import fork

ALL = dict(D=True, z=True, sigmoid=True, scale=0.3)


@dataclass
class Job:
    """A case, and what runs it."""

    case: Case
    # by default the usual one
    backend: str = ''
    # of the Triton backend, if not by its own rule
    segment_length: int | None = None
    op: Callable = chunk_longhorn
    # each value of `exact` that is run
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
        'a decay per head': Job(Case(H=2, K=3, V=6, g='head', **ALL).packed(5, T - 16, 11)),
        'a decay per channel, whole': Job(Case(H=2, K=5, V=7, g='channel').packed(T)),
        'torch, a decay per channel': Job(Case(H=2, K=3, V=6, g='channel', **ALL).packed(T - 5, 5), 'torch'),
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


def run(
    job: Job, exact: bool, group: dist.ProcessGroup, device: str = 'cpu', twice: bool = False,
) -> dict[str, torch.Tensor]:
    """This rank's outputs and gradients, on the CPU; `twice`, after a second derivative."""
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
    # the context has the boundaries, and an operator with one returns no final state
    options = make_options(replace(case, lengths=None, final_state=False), exact=exact)
    o, _ = job.op(**inputs, **options, cp_context=context)
    do = output_gradient(case)[:, mine].to(device)
    if twice:
        (dk,) = torch.autograd.grad(o, inputs['k'], do, create_graph=True)
        torch.autograd.grad(dk.sum(), inputs['q'], allow_unused=True)
    o.backward(do)
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


def output_gradient(case: Case) -> torch.Tensor:
    return torch.randn(1, case.T, case.H, case.V, generator=torch.Generator().manual_seed(1)).to(case.dtype)


def verify(case: Case, exact: bool, parts: list[dict[str, torch.Tensor]]) -> None:
    """Outputs and gradients of all ranks."""
    inputs = {name: x.detach().double().requires_grad_() for name, x in make_inputs(case).items()}
    o, _ = naive_recurrent_longhorn(**inputs, **make_options(case, exact=exact))
    o.backward(output_gradient(case).double())
    ref = {'o': o.detach(), **{f'd{name}': x.grad for name, x in inputs.items()}}
    of_ranks = {name: [part[name] for part in parts] for name in ref}
    assert_close({name: sum(x) if name == 'dD' else torch.cat(x, 1) for name, x in of_ranks.items()}, ref, case.dtype)


def verify_traffic(counts: dict[str, list[int]], case: Case, exact: bool, name: str, rank: int, size: int) -> None:
    """As `docs/scale.md` says."""
    state = 4 * case.H * case.K * case.V
    if not exact:
        # two arrays of the size of a state, whatever the number of ranks and wherever the boundaries
        assert counts == {'all_gather': [2 * state] * 2}, (name, counts)
    elif name == 'whole':
        # one state to the next rank and its gradient to the previous one
        neighbours = (rank > 0) + (rank < size - 1)
        assert counts == {'isend': [state] * neighbours, 'recv': [state] * neighbours}, counts
    elif name == 'boundaries on the edges':
        assert counts == {}, counts


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [(dist.new_group([i, i + 1]), [i, i + 1]) for i in range(0, size, 2)]
    make_jobs = triton_jobs if os.environ.get('TRITON_INTERPRET') == '1' else jobs

    # all collectives first, then each rank computes the references of some cases
    results = {}
    for group, members in ((dist.group.WORLD, list(range(size))), *pairs):
        for i, (name, job) in enumerate(make_jobs(len(members)).items()):
            for exact in job.updates:
                # the pairs share the cases for two ranks
                if rank not in members or (len(members) < size and pairs[i % len(pairs)][1] != members):
                    continue
                with traffic() as counts:
                    got = run(job, exact, group)
                verify_traffic(counts, job.case, exact, name, members.index(rank), len(members))
                if name == 'boundaries inside':
                    again = run(job, exact, group)
                    assert all(torch.equal(got[x], again[x]) for x in got), 'repeats differ'
                    with pytest.raises(RuntimeError, match='no second derivative .* call naive_recurrent_longhorn'):
                        run(job, exact, group, twice=True)
                owner = members[i % len(members)]
                parts = [None] * len(members) if rank == owner else None
                dist.gather_object(got, parts, dst=owner, group=group)
                if rank == owner:
                    results[name, len(members), exact] = job.case, exact, parts
    for case, result in results.items():
        print(*case, flush=True)
        verify(*result)


@pytest.mark.parametrize('triton', [False, pytest.param(True, marks=pytest.mark.slow)], ids=['cpu', 'triton'])
def test_equals_one_rank(triton):
    # Triton and fla ask when they are imported
    forks.output('-m', 'tests.ops.context_parallel.test_op', fla=not triton, env={'TRITON_INTERPRET': str(int(triton))})


def arguments(device) -> dict[str, torch.Tensor]:
    return {name: torch.rand(1, 6, 1, n, device=device) for name, n in {'q': 3, 'k': 3, 'v': 4, 'beta': 4}.items()}


def context(device, **changes) -> FLACPContext:
    cu_seqlens = torch.tensor([0, 2, 6], device=device)
    return FLACPContext(**{'cu_seqlens': cu_seqlens, 'pre_num_ranks': 0, 'post_num_ranks': 0, **changes})


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize(('change', 'error', 'message'), [
    (None, TypeError, 'cp_context must be a fla.ops.cp.FLACPContext or None, got int'),
    ({'layout': 'zigzag'}, ValueError, "layout 'contiguous', got 'zigzag'"),
    ({'cu_seqlens': None}, ValueError, 'cp_context must hold the cu_seqlens'),
    (
        {'cu_seqlens': torch.tensor([0, 12])}, ValueError,
        'cp_context.cu_seqlens must end at the number of tokens T = 6, got 12',
    ),
], ids=['no context', 'zigzag', 'no boundaries', 'another length'])
def test_bad_call(op, change, error, message, device):
    if change is not None:
        change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(error, match=message):
        op(**arguments(device), cp_context=2 if change is None else context(device, **change))


def test_two_rows(device):
    call = {name: x.expand(2, *x.shape[1:]) for name, x in arguments(device).items()}
    with pytest.raises(ValueError, match='cp_context.cu_seqlens packs all sequences .* q must have B = 1, got B = 2'):
        chunk_longhorn(**call, cp_context=context(device))


def test_the_naive_op_names_the_one_to_call(device):
    with pytest.raises(ValueError, match='cp_context must be None in the naive op.*chunk_longhorn takes it'):
        naive_recurrent_longhorn(**arguments(device), cp_context=context(device))


def test_without_a_group(device):
    """A context that is off is its boundaries."""
    call = arguments(device)
    o, state = chunk_longhorn(**call, cp_context=context(device))
    assert state is None
    assert torch.equal(o, chunk_longhorn(**call, cu_seqlens=torch.tensor([0, 2, 6], device=device))[0])


class TestOneRank:
    @pytest.fixture(autouse=True)
    def group(self):
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.mark.parametrize('exact', [False, True])
    def test_is_the_plain_op(self, exact, device):
        call, cu_seqlens = arguments(device), torch.tensor([0, 2, 6], device=device)
        o, _ = chunk_longhorn(**call, exact=exact, cp_context=build_cp_context(cu_seqlens, dist.group.WORLD))
        assert torch.equal(o, chunk_longhorn(**call, exact=exact, cu_seqlens=cu_seqlens)[0])

    @pytest.mark.parametrize('name, count', [('pre_num_ranks', 1), ('post_num_ranks', 1), ('pre_num_ranks', None)])
    def test_ranks_that_there_are_not(self, name, count, device):
        bad = context(device, group=dist.group.WORLD, **{name: count})
        with pytest.raises(ValueError, match=f'cp_context.{name} must be between 0 and 0 on rank 0 of 1, got {count}'):
            chunk_longhorn(**arguments(device), cp_context=bad)


if __name__ == '__main__':
    hasten_interpreter()
    fork(main, 4)
