"""Conditions that few shapes meet: each of `BRANCHES`, and inputs, boundaries and gradients that are not contiguous."""

from pathlib import Path

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, longhorn_state_update, naive_recurrent_longhorn, operator
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.ops.cases import BRANCHES, assert_close, check, reference, run

pytestmark = pytest.mark.usefixtures('backend', 'poison')
TRITON = Path(operator.__file__).parent / 'triton'


@pytest.mark.parametrize(('file', 'name'), [(file, name) for file, cases in BRANCHES.items() for name in cases])
def test_smallest_case(file, name, device):
    assert (TRITON / file).exists()
    for exact in (False, True) if file not in ('diagonal', 'exact') else (file == 'exact',):
        check(chunk_longhorn, BRANCHES[file][name], device, exact)


def test_saved_states_are_all_written(exact, device):
    """Packed sequences have slots that no token fills."""
    case = Case(H=1, K=4, V=3, initial_state=True).packed(31, 2, 0, 33)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    args = Arguments(**inputs, **options)
    assert operator.longhorn_fwd(*args._replace(scale=1.0), True, True)[2].isfinite().all()


def apart(x, dim, i):
    """`x` with room for `i` of its size between what lies along `dim`: NaN, which nothing may read."""
    return torch.cat([x, *[torch.full_like(x, float('nan'))] * i], dim).narrow(dim, 0, x.shape[dim])


PER_TOKEN = ('q', 'k', 'v', 'beta', 'z', 'g')
# rows, tokens or heads lie apart, each input's by another distance
SPACED = [
    pytest.param(case, dim, id=f'{case}-{name}') for dim, name in ((1, 'rows'), (2, 'tokens'), (3, 'heads')) for case in (
        Case(B=2, T=3, H=2, K=4, V=6, g='channel', z=True),
        *([] if dim == 3 else [Case(B=2, T=3, H=2, K=4, V=6, g='head', scalar_beta=True, z=True)]),
    )
]


@pytest.mark.parametrize(('case', 'dim'), SPACED)
def test_inputs_with_room_between(case, dim, exact, device):
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    ref = reference(inputs, options)
    for i, name in enumerate(PER_TOKEN):
        inputs[name] = apart(inputs[name].detach(), dim, i + 1).requires_grad_()
        assert not inputs[name].is_contiguous()
    assert_close(run(chunk_longhorn, inputs, options), ref, case.dtype)


@torch.no_grad()
@pytest.mark.parametrize(('case', 'dim'), SPACED)
def test_a_token_with_room_between(case, dim, exact, device):
    inputs = {name: x.detach()[:, :1] for name, x in make_inputs(case, device).items()}
    doubles = {name: x.double() for name, x in inputs.items()}
    o, final_state = naive_recurrent_longhorn(**doubles, exact=exact, output_final_state=True)
    state = torch.zeros_like(final_state, dtype=torch.float32)
    spaced = {name: apart(inputs[name], dim, i + 1) for i, name in enumerate(PER_TOKEN)}
    assert relative_error(longhorn_state_update(state, **spaced, exact=exact), o) <= 1e-5
    assert relative_error(state, final_state) <= 1e-5


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64], ids=str)
def test_boundaries_with_room_between(dtype, exact, device):
    case = Case(H=1, K=4, V=3, initial_state=True).packed(2, 0, 3)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    ref = reference(inputs, options)
    # what lies side by side, [0, 1, 2, 3], are boundaries too
    bounds = torch.tensor([0, 1, 2, 3, 2, 4, 5, 5], dtype=dtype, device=device)[::2]
    assert bounds.tolist() == [0, 2, 2, 5] and not bounds.is_contiguous()
    options['cu_seqlens'] = bounds
    assert_close(run(chunk_longhorn, inputs, options), ref, case.dtype)


LOSSES = {
    'outputs': lambda o, state: o.sum(),
    'outputs among others': lambda o, state: torch.cat([o, o.detach()], 2).square().sum(),
    'state': lambda o, state: state.square().sum(),
    'expanded': lambda o, state: state.sum(),
    'transposed': lambda o, state: state.mT.contiguous().square().sum(),
}


@pytest.mark.parametrize('z', [False, True], ids=['plain', 'z'])
@pytest.mark.parametrize('loss', LOSSES)
def test_gradients_of_one_output(exact, loss, z, device):
    """Whose own gradient is expanded, strided or transposed, and the other's absent."""
    case = Case(B=2, T=17, H=2, K=4, V=3, z=z, initial_state=True)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    doubles = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    LOSSES[loss](*chunk_longhorn(**inputs, **options)).backward()
    LOSSES[loss](*naive_recurrent_longhorn(**doubles, **options)).backward()
    for name, x in doubles.items():
        if x.grad is None:
            assert inputs[name].grad is None or not inputs[name].grad.any(), name
        else:
            assert relative_error(inputs[name].grad, x.grad) <= 1e-4, name
