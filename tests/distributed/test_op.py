"""Context parallelism of the ops: two and four ranks against one, and the calls that it refuses."""

import pytest
import torch
import torch.distributed as dist
from fla.ops.cp import FLACPContext, build_cp_context

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn
from tests import forks


@pytest.mark.parametrize('triton', [False, pytest.param(True, marks=pytest.mark.slow)], ids=['numba', 'triton'])
def test_equals_one_rank(triton):
    # Triton and fla ask when they are imported
    forks.output('-m', 'tests.distributed.scripts.op', fla=not triton, env={'TRITON_INTERPRET': str(int(triton))})


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
