"""A decay of the state before each step: the operators with `g` against the naive one in float64, and what it equals."""

import pytest
import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gla.naive import naive_recurrent_gla

from fla_longhorn.ops import (
    chunk_longhorn,
    fused_recurrent_longhorn,
    longhorn_state_update,
    naive_recurrent_longhorn,
)
from fla_longhorn.selfcheck.compare import relative_error
from tests.ops.cases import Case, check, make_inputs, make_options

ALL = dict(D=True, z=True, initial_state=True)
CASES = [
    Case(B=2, T=35, K=4, V=12, g='channel', initial_state=True),
    Case(B=2, T=35, K=4, V=12, g='head', sigmoid=True, **ALL),
    Case(B=1, T=33, H=2, K=3, V=5, g='channel', scalar_beta=True, state_v_first=True, scale=0.5, allow_neg_eigval=True, **ALL),
    Case(B=1, T=40, K=4, V=12, g='head', scalar_beta=True, allow_neg_eigval=True),
    Case(B=1, T=300, H=1, K=4, V=6, g='channel'),
    Case(H=2, K=4, V=6, g='channel', **ALL).packed(5, 0, 33, 150),
    # decays of which float32 holds no inverse: exp(-200)
    Case(B=1, T=35, H=1, K=4, V=6, g='channel', lowest=-200., initial_state=True),
    Case(B=1, T=35, H=1, K=4, V=6, g='head', dtype=torch.bfloat16, **ALL),
]


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
@pytest.mark.parametrize('case', CASES, ids=str)
def test_outputs_and_gradients(op, case, exact, device):
    check(op, case, device, exact)


@pytest.mark.parametrize('g', ['head', 'channel'])
def test_no_decay_changes_nothing(g, exact):
    """`g = 0` is the operator without: to the bit in the naive one."""
    case = Case(B=1, T=20, K=4, V=6, g=g, initial_state=True)
    inputs = {name: x.detach() for name, x in make_inputs(case).items()}
    without = {name: x for name, x in inputs.items() if name != 'g'}
    options = make_options(case, exact=exact)
    got = naive_recurrent_longhorn(**without, g=torch.zeros_like(inputs['g']), **options)
    assert all(map(torch.equal, got, naive_recurrent_longhorn(**without, **options)))


def test_a_later_decay_changes_no_earlier_bit(exact, device):
    case = Case(B=1, T=40, H=1, K=4, V=6, g='channel')
    inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
    options = make_options(case, device, exact)
    o, _ = chunk_longhorn(**inputs, **options)
    inputs['g'][:, 20] *= 2
    changed, _ = chunk_longhorn(**inputs, **options)
    assert torch.equal(o[:, :20], changed[:, :20])
    assert not torch.equal(o[:, 20:], changed[:, 20:])


def test_is_the_gated_delta_rule():
    """Exact, one step and one decay per head: fla's rule with the step for its beta, on keys as they are."""
    case = Case(B=2, T=30, H=2, K=4, V=6, scalar_beta=True, g='head', initial_state=True)
    inputs, options = {name: x.detach() for name, x in make_inputs(case).items()}, make_options(case, exact=True)
    q, k, v, beta, g, h = (inputs[name] for name in ('q', 'k', 'v', 'beta', 'g', 'initial_state'))
    eps = beta / (1 + beta * k.square().sum(-1))
    o, state = naive_recurrent_longhorn(**inputs, **options)
    expected = naive_recurrent_gated_delta_rule(q, k, v, eps, g, scale=1.0, initial_state=h, output_final_state=True)
    assert relative_error(o, expected[0]) < 1e-5
    assert relative_error(state, expected[1]) < 1e-5


def test_is_gated_linear_attention():
    """Diagonal, one step and one decay per head: GLA with `gk = g + log(1 - eps k^2)` and values times the step."""
    case = Case(B=2, T=30, H=2, K=4, V=6, scalar_beta=True, g='head', initial_state=True)
    inputs, options = {name: x.detach() for name, x in make_inputs(case).items()}, make_options(case)
    q, k, v, beta, g, h = (inputs[name] for name in ('q', 'k', 'v', 'beta', 'g', 'initial_state'))
    eps = (beta / (1 + beta * k.square().sum(-1)))[..., None]
    o, state = naive_recurrent_longhorn(**inputs, **options)
    gk = g[..., None] + torch.log1p(-eps * k.square())
    expected = naive_recurrent_gla(q, k, eps * v, gk, initial_state=h, output_final_state=True)
    # its queries are divided by the root of K
    assert relative_error(o, expected[0] * 4**0.5) < 1e-5
    assert relative_error(state, expected[1]) < 1e-5


def test_is_the_minimiser(exact):
    """The exact state minimises `|S - e^g S'|^2 + |S^T k - v|^2_diag(beta)`: there the gradient vanishes."""
    case = Case(B=1, T=1, H=1, K=5, V=3, g='channel', initial_state=True)
    inputs = {name: x.detach().double() for name, x in make_inputs(case).items()}
    _, S = naive_recurrent_longhorn(**inputs, exact=exact, output_final_state=True)
    S = S[0, 0].requires_grad_()
    k, v, beta, g = (inputs[name].flatten() for name in ('k', 'v', 'beta', 'g'))
    objective = (S - g.exp() * inputs['initial_state'][0, 0]).square().sum() + (beta * (k @ S - v).square()).sum()
    gradient, = torch.autograd.grad(objective, S)
    assert (gradient.abs().max() < 1e-12) == exact


@pytest.mark.parametrize('pooled', [False, True], ids=['states', 'pool'])
@pytest.mark.parametrize('T', [1, 5])
@torch.no_grad()
def test_states_in_place(T, pooled, exact, device):
    case = Case(B=2, T=T, H=2, K=4, V=6, g='channel', **ALL)
    inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
    wanted, final = fused_recurrent_longhorn(**inputs, output_final_state=True, exact=exact)
    state = inputs.pop('initial_state')
    rows = torch.tensor([3, 1], device=device)
    pool = state.new_full((5, *state.shape[1:]), float('nan'))
    pool[rows] = state
    o = longhorn_state_update(pool if pooled else state, **inputs, exact=exact, state_indices=rows if pooled else None)
    assert torch.equal(o, wanted)
    assert torch.equal(pool[rows] if pooled else state, final)
    assert not pooled or pool[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize(('change', 'kind', 'message'), [
    (dict(g=torch.zeros(1, 3, 1, 5)), ValueError, r'g must have shape \[B, T, H, V\] \(one decay per channel\)'),
    (dict(g=torch.zeros(1, 3, 2)), ValueError, r'g must have shape \[B, T, H\] \(one decay per head\)'),
    (dict(g=-1.0), TypeError, 'g must be a torch.Tensor, got float'),
    (dict(g=torch.zeros(1, 3, 1, dtype=torch.int64)), TypeError, 'g must be float16, bfloat16 or float32'),
], ids=str)
def test_errors(change, kind, message):
    inputs = {name: x.detach() for name, x in make_inputs(Case(B=1, T=3, H=1, K=4, V=6)).items()}
    with pytest.raises(kind, match=message):
        chunk_longhorn(**inputs | change)


def test_not_with_context_parallelism():
    inputs = {name: x.detach() for name, x in make_inputs(Case(B=1, T=3, H=1, K=4, V=6, g='head')).items()}
    with pytest.raises(ValueError, match='g must be None with cp_context'):
        chunk_longhorn(**inputs, cp_context=object())


@pytest.mark.parametrize('name', ['numba', 'triton'])
def test_a_backend_without_decays_is_not_left_silently(name, monkeypatch):
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', name)
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    inputs = {name: x.detach() for name, x in make_inputs(Case(B=1, T=3, H=1, K=4, V=6, g='head')).items()}
    with pytest.raises(ValueError, match=f'g must be None with FLA_LONGHORN_BACKEND={name}'):
        chunk_longhorn(**inputs)
