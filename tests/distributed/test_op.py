"""Context parallelism of the ops: two and four ranks against one, and the calls that it refuses."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fla.ops.cp import FLACPContext, build_cp_context

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn
from tests import forks
from tests.distributed.scripts import op as script
from tests.ops.cases import TOLERANCE

# what a file starts once stays in one worker
pytestmark = pytest.mark.xdist_group('context parallel op')


def results(path: Path, **options) -> dict:
    forks.output('-m', 'tests.distributed.scripts.op', 4, path, **options)
    return json.loads(path.read_text())


@pytest.fixture(scope='module')
def cpu(tmp_path_factory) -> dict:
    return results(tmp_path_factory.mktemp('op') / 'cpu.json')


@pytest.fixture(scope='module')
def triton(tmp_path_factory) -> dict:
    # Triton and fla ask when they are imported
    return results(tmp_path_factory.mktemp('op') / 'triton.json', fla=False, env={'TRITON_INTERPRET': '1'})


def check(found: dict, jobs: dict, size: int, exact: bool, name: str) -> None:
    errors = found['errors'][script.key(size, exact, name)]
    case = jobs[name].case
    assert set(errors) == {'o', 'dq', 'dk', 'dv', 'dbeta'} | {f'd{x}' for x in ('D', 'z') if getattr(case, x)}
    outputs, gradients = TOLERANCE[case.dtype]
    off = {x: error for x, error in errors.items() if not error <= (outputs if x == 'o' else gradients)}
    assert not off, off


def combinations(make_jobs) -> list[tuple[int, str, bool]]:
    return [(size, name, exact) for size in (2, 4) for name, job in make_jobs(size).items() for exact in job.updates]


@pytest.mark.parametrize('size, name, exact', combinations(script.jobs))
def test_equals_one_rank(cpu, size, name, exact):
    check(cpu, script.jobs(size), size, exact, name)


@pytest.mark.slow
@pytest.mark.parametrize('size, name, exact', combinations(script.triton_jobs))
def test_triton_equals_one_rank(triton, size, name, exact):
    check(triton, script.triton_jobs(size), size, exact, name)


def test_repeats_are_bit_equal(cpu):
    assert len(cpu['repeats']) == 4
    assert all(cpu['repeats'].values()), cpu['repeats']


def test_diagonal_gathers_once_each_way(cpu):
    """`docs/scale.md`: two arrays of the size of a state, whatever the number of ranks and wherever the boundaries."""
    for name, job in script.jobs(4).items():
        size = 2 * job.case.H * job.case.K * job.case.V * 4
        for counts in cpu['traffic']:
            assert counts[script.key(4, False, name)] == {'all_gather': [size, size]}


def test_exact_passes_the_state_on(cpu):
    """One state to the next rank and its gradient to the previous one, where a sequence goes on there."""
    size = 4 * 2 * 5 * 7
    whole = [traffic['4 ranks, exact, whole'] for traffic in cpu['traffic']]
    assert whole == [{'isend': [size] * n, 'recv': [size] * n} for n in (1, 2, 2, 1)]
    assert [traffic['4 ranks, exact, boundaries on the edges'] for traffic in cpu['traffic']] == [{}] * 4


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
