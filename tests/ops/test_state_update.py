"""The state updated in place: what fused_recurrent_longhorn returns, without a new state."""

from __future__ import annotations

import pytest
import torch

from fla_longhorn.ops import fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING
from tests.ops.cases import TOLERANCE, reference

CASES = [
    Case(B=2, T=1, H=1, K=16, V=33, initial_state=True),
    Case(B=1, T=1, H=2, K=3, V=5, D=True, z=True, sigmoid=True, initial_state=True, scale=0.5),
    Case(B=2, T=1, H=2, K=5, V=16, scalar_beta=True, state_v_first=True, initial_state=True),
    Case(B=1, T=7, H=1, K=20, V=9, initial_state=True),
    Case(B=2, T=1, H=2, K=4, V=6, g='channel', sigmoid=True, D=True, z=True, initial_state=True),
    Case(B=2, T=5, H=2, K=4, V=40, g='head', scalar_beta=True, initial_state=True),
    Case(H=1, K=4, V=9, initial_state=True).packed(1, 0, 3, 1),
]

pytestmark = pytest.mark.usefixtures('backend', 'poison')


@pytest.mark.parametrize('case', CASES, ids=str)
def test_in_place(case, exact, device):
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    ref = reference(inputs, options)
    inputs = {name: x.detach() for name, x in inputs.items()}
    given = {name: x.clone() for name, x in inputs.items()}
    o_expected, state_expected = fused_recurrent_longhorn(**inputs, **options)
    state, data = inputs.pop('initial_state'), given['initial_state']
    pointer, options = state.data_ptr(), {n: x for n, x in options.items() if n != 'output_final_state'}
    o = longhorn_state_update(state, **inputs, **options)
    assert state.data_ptr() == pointer
    assert not torch.equal(state, data)
    assert torch.equal(o, o_expected)
    assert torch.equal(state, state_expected)
    assert relative_error(o, ref['o']) <= 1e-5
    assert relative_error(state, ref['final_state']) <= 1e-5
    assert all(torch.equal(x, given[name]) for name, x in inputs.items())


@torch.no_grad()
@pytest.mark.parametrize('pooled', [False, True], ids=['states', 'pool'])
@pytest.mark.parametrize('T', [1, 2])
def test_inputs_in_the_memory_of_the_state(T, pooled, exact, device):
    """The first numbers of the states as an input: some are written before others are read."""
    # channels for several blocks
    H, V = (1, 70) if INTERPRETING else (2, 300)
    case = Case(B=2, T=T, H=H, K=16, V=V, D=True, z=True, initial_state=True)
    inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
    given = inputs.pop('initial_state').sigmoid()
    rows = {'state_indices': torch.tensor([1, 0], device=device)} if pooled else {}
    for name, x in inputs.items():
        state, expected = given.clone(), given.clone()
        shared = state.flatten()[:x.numel()].view(x.shape)
        o_expected = longhorn_state_update(expected, **{**inputs, name: shared.clone()}, exact=exact, **rows)
        o = longhorn_state_update(state, **{**inputs, name: shared}, exact=exact, **rows)
        assert torch.equal(o, o_expected), name
        assert torch.equal(state, expected), name


@pytest.mark.parametrize('mode', [torch.no_grad, torch.enable_grad], ids=['plain', 'operator'])
@pytest.mark.parametrize('T', [1, 2])
@pytest.mark.parametrize('pooled', [False, True], ids=['states', 'pool'])
def test_an_update_is_counted(T, pooled, mode, device):
    """What autograd has saved of the states is no longer theirs: backward must not go on with it."""
    inputs = {name: x.detach() for name, x in make_inputs(Case(T=T, K=4, initial_state=True), device).items()}
    state = inputs.pop('initial_state')
    weight = torch.ones_like(state, requires_grad=True)
    loss = (weight * state).sum()
    with mode():
        longhorn_state_update(state, **inputs, state_indices=torch.tensor([1, 0], device=device) if pooled else None)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


@torch.no_grad()
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize('D_dtype', [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_token_with_D_in_another_dtype(dtype, D_dtype, device):
    case = Case(T=1, H=2, K=4, D=True, z=True, initial_state=True, dtype=dtype)
    inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
    inputs['D'] = inputs['D'].to(D_dtype)
    state = inputs.pop('initial_state')
    exact = {name: x.double() for name, x in inputs.items()}
    ref, final_state = naive_recurrent_longhorn(**exact, initial_state=state.double(), output_final_state=True)
    o = longhorn_state_update(state, **inputs)
    outputs, _ = TOLERANCE[dtype]
    assert o.dtype == dtype
    assert relative_error(o, ref) <= outputs
    assert relative_error(state, final_state) <= 1e-5


@torch.no_grad()
def test_a_token_whose_gate_lies_apart(exact, device):
    """Values and gates of the rows, halves of a projection: both further apart than their channels, by other distances."""
    case = Case(B=3, T=1, H=2, K=4, V=20, z=True, initial_state=True)
    inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
    state = inputs.pop('initial_state')
    expected = state.clone()
    o_expected = longhorn_state_update(expected, **inputs, exact=exact)
    for name, copies in (('v', 3), ('z', 2)):
        apart = torch.cat([inputs[name]] + [torch.full_like(inputs[name], float('nan'))] * (copies - 1), 1)
        inputs[name] = apart[:, :1]
    assert torch.equal(longhorn_state_update(state, **inputs, exact=exact), o_expected)
    assert torch.equal(state, expected)
