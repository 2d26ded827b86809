"""The state updated in place: what fused_recurrent_longhorn returns, without a new state."""

from __future__ import annotations

import pytest
import torch

from fla_longhorn.ops import fused_recurrent_longhorn, longhorn_state_update, operator
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool
from tests.ops.cases import Case, make_inputs, make_options, reference, relative_error

CASES = [
    Case(B=2, T=1, H=1, K=16, V=33, initial_state=True),
    Case(B=1, T=1, H=2, K=3, V=5, D=True, z=True, sigmoid=True, initial_state=True, scale=0.5),
    Case(B=2, T=1, H=2, K=5, V=16, scalar_beta=True, state_v_first=True, initial_state=True),
    Case(B=1, T=7, H=1, K=20, V=9, initial_state=True),
    Case(H=1, K=4, V=9, initial_state=True).packed(1, 0, 3, 1),
]

pytestmark = pytest.mark.usefixtures('backend', 'poison')


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
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


def test_opcheck(device):
    inputs = make_inputs(Case(B=1, T=1, H=1, K=3, V=4, D=True, initial_state=True), device)
    x = {name: x.detach() for name, x in inputs.items()}
    torch.library.opcheck(
        torch.ops.fla_longhorn.longhorn_update,
        (*Pool(x.pop('initial_state')), *Arguments(**x, output_final_state=True)),
        test_utils=('test_schema', 'test_faketensor'),
    )


@pytest.mark.parametrize(('change', 'error', 'message'), [
    (lambda state: None, TypeError, 'state must be a torch.Tensor'),
    (lambda state: state.half(), TypeError, 'state must be float32 to be updated in place, got torch.float16'),
    (lambda state: state[:, :, :2], ValueError, r'state must have shape \[N, H, K, V\], one state a sequence'),
    (lambda state: state.mT.contiguous().mT, ValueError, 'state must have contiguous rows'),
    (lambda state: state.clone().requires_grad_(), ValueError, 'longhorn_state_update has no gradient'),
])
def test_bad_state(change, error, message, device):
    inputs = {name: x.detach() for name, x in make_inputs(Case(T=1, K=4, initial_state=True), device).items()}
    state = inputs.pop('initial_state')
    with pytest.raises(error, match=message):
        longhorn_state_update(change(state), **inputs)


@torch.no_grad()
def test_the_operator_counts_one_update(device):
    """What autograd has saved of the states is no longer theirs."""
    q, k = torch.randn(2, 2, 1, 1, 16, device=device)
    v, beta = torch.rand(2, 2, 1, 1, 8, device=device)
    state = torch.ones(2, 1, 16, 8, device=device)
    with torch.enable_grad():
        weight = torch.ones_like(state, requires_grad=True)
        loss = (weight * state).sum()
    before = state._version
    operator.run_update(Pool(state), Arguments(q, k, v, beta))
    assert state._version == before + 1
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()
