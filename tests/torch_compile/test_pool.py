"""A pool of states under compilers: views written through, and `torch.library.opcheck`."""

import pytest
import torch

from fla_longhorn.ops import longhorn_state_update
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool
from fla_longhorn.selfcheck.case import Case, make_inputs
from tests.torch_compile.graphs import assert_equal, compiled

CASE = Case(B=3, T=1, H=2, K=5, V=6, D=True, z=True)
P, GUARD = 7, 4
SIZE = 2 * 5 * 6


def choices(device) -> dict:
    return {
        'state_indices': torch.tensor([5, -1, 0], device=device),
        'final_state_indices': torch.tensor([5, 2, 3], dtype=torch.int32, device=device),
        'has_initial_state': torch.tensor([False, True, True], device=device),
    }


def view(page: torch.Tensor) -> torch.Tensor:
    return page[:, GUARD:].unflatten(1, (2, 5, 6))


def step(page, inputs, rows, exact):
    """What an engine compiles: the pool is a view of a page, and what was written is used after."""
    o = longhorn_state_update(view(page), **inputs, **rows, exact=exact)
    return o * 2, page[:, GUARD:].sum(1), page[3] + 1


@pytest.mark.parametrize('compiler', ['aot_eager', pytest.param('inductor', marks=[pytest.mark.compiler, pytest.mark.slow])])
def test_a_view_is_written_through(compiler, exact, device):
    inputs = {name: x.detach() for name, x in make_inputs(CASE, device).items()}
    page = torch.randn(P, GUARD + SIZE, device=device)
    expected_page, before, pointer = page.clone(), page.clone(), page.data_ptr()
    function, counter = compiled(step, compiler)
    for _ in range(2):
        expected = step(expected_page, inputs, choices(device), exact)
        got = function(page, inputs, choices(device), exact)
        assert_equal(dict(enumerate((*got, page))), dict(enumerate((*expected, expected_page))))
    assert counter.frame_count == 1
    assert page.data_ptr() == pointer
    written = (page != before).any(1).nonzero().flatten().tolist()
    assert written == [3, 5]
    assert torch.equal(page[:, :GUARD], before[:, :GUARD])


@pytest.mark.parametrize('lengths', [None, (4, 0, 3)], ids=['decode', 'prefill'])
def test_opcheck(lengths, exact, device):
    case = CASE if lengths is None else CASE.packed(*lengths)
    inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
    args = Arguments(**inputs, output_final_state=True, exact=exact)
    if lengths is not None:
        args = args._replace(cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0))
    pool = Pool(view(torch.randn(P, GUARD + SIZE, device=device)), **choices(device))
    torch.library.opcheck(torch.ops.fla_longhorn.longhorn_update, (*pool, *args))
