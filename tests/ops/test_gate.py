"""A decay of the state before each step: the operators with `g` against the naive one in float64, and what it equals."""

import pytest
import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gla.naive import naive_recurrent_gla

from fla_longhorn.ops import (
    chunk_longhorn,
    fused_recurrent_longhorn,
    naive_recurrent_longhorn,
)
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING
from tests.ops.cases import check, interpreted, run

ALL = dict(D=True, z=True, initial_state=True)


CASES = [
    Case(B=2, T=35, H=1, K=4, V=12, g='head', sigmoid=True, **ALL),
    Case(B=1, T=33, H=2, K=3, V=5, g='channel', scalar_beta=True, state_v_first=True, scale=0.5, allow_neg_eigval=True, **ALL),
    Case(B=1, T=40, H=1, K=4, V=12, g='head', scalar_beta=True, allow_neg_eigval=True),
    Case(B=1, T=300, H=1, K=4, V=6, g='channel'),
    Case(H=1, K=4, V=6, g='channel', **ALL).packed(5, 0, 33, 40),
    # decays of which float32 holds no inverse: exp(-200)
    Case(B=1, T=35, H=1, K=4, V=6, g='channel', lowest=-200., initial_state=True),
    Case(B=1, T=35, H=1, K=4, V=6, g='head', dtype=torch.bfloat16, **ALL),
    Case(B=1, T=35, H=1, K=4, V=6, g='channel', dtype=torch.float16, allow_neg_eigval=True, initial_state=True),
    # several strips in an interval of saved states
    Case(B=1, T=270, H=1, K=64, V=34, g='channel', z=True),
    # several blocks of channels
    Case(B=1, T=20, H=2, K=4, V=300, g='head', scalar_beta=True, initial_state=True),
    # two blocks of K, whose sums over K go through scratch
    Case(B=1, T=21, H=1, K=24, V=33, g='head', scalar_beta=True, state_v_first=True, scale=0.5, **ALL),
    # tensor cores, and decays in float32
    Case(B=1, T=37, H=1, K=16, V=64, g='channel', dtype=torch.bfloat16, dtypes=(('g', torch.float32),), z=True),
]


@pytest.mark.usefixtures('poison')
@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn])
# large ones are for what the backends of the CPU cut time and channels into
@pytest.mark.parametrize('case', interpreted((0, 1, 2, 4, 5, 10, 11), *CASES), ids=str)
def test_outputs_and_gradients(op, case, exact, device, backend):
    check(op, case, device, exact)


@pytest.mark.parametrize(('g', 'lowest', 'doubled'), interpreted(
    (0,), ('channel', -5., False), ('head', -0.01, False), ('channel', 0., True),
))
def test_long_sequences(g, lowest, doubled, exact, device, backend):
    """Decays from 1 to e^-5 over many tokens: the bounds are those without a gate, that of dg among them."""
    T = 96 if INTERPRETING else 512
    case = Case(B=1, T=T, H=1, K=16, V=8, g=g, lowest=lowest, allow_neg_eigval=doubled, initial_state=True)
    check(chunk_longhorn, case, device, exact)


def without_gate(case, op, device, exact, make_g):
    """All results with the decays of `make_g(g)`, and those without."""
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    g = make_g(inputs.pop('g').detach()).requires_grad_()
    return run(op, inputs | {'g': g}, options), run(op, inputs, options)


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn])
@pytest.mark.parametrize('g', [100.0, float('inf')])
def test_growth_beyond_float32_is_not_finite(g, op, exact, device, backend):
    """A decay is at most one: what a wrong sign does is seen."""
    case = Case(B=1, T=10, H=1, K=4, V=6, g='head')
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    inputs['g'] = torch.full_like(inputs['g'], -0.1)
    inputs['g'][:, 4] = g
    with torch.no_grad():
        o = op(**inputs, **options)[0]
    # products of a chunk may spread it to earlier tokens
    assert not o[:, 4:].isfinite().any()


@pytest.mark.parametrize('g', ['head', 'channel'])
def test_a_decay_of_zero_forgets_all(g, exact, device, backend):
    """`g = -inf` starts anew, whatever the state was; and has no gradient."""
    case = Case(B=1, T=10, H=1, K=4, V=6, g=g, initial_state=True)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    with torch.no_grad():
        inputs['g'][:, 4] = -float('inf')
        inputs['initial_state'] *= 1e30
    got = run(chunk_longhorn, inputs, options)
    later = {name: x[:, 4:] for name, x in inputs.items() if name != 'initial_state'}
    o, final_state = chunk_longhorn(**later, **options)
    # chunks begin elsewhere, so that sums have another order
    assert relative_error(got['o'][:, 4:], o) < 1e-6 and relative_error(got['final_state'], final_state) < 1e-6
    with torch.no_grad():
        inputs['initial_state'].zero_()
        inputs['v'][:, :4] = 7
    others = run(chunk_longhorn, inputs, options)
    assert torch.equal(got['o'][:, 4:], others['o'][:, 4:]) and torch.equal(got['final_state'], others['final_state'])
    assert not got['dg'][:, 4].any() and not got['dinitial_state'].isnan().any()


@pytest.mark.parametrize('g', interpreted((1,), 'head', 'channel'))
def test_a_later_decay_changes_no_earlier_bit(g, exact, device, backend):
    """Of outputs; nor, of a loss on the tokens before, of any gradient."""
    case = Case(B=1, T=40, H=1, K=4, V=6, g=g)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)

    def results():
        o, _ = chunk_longhorn(**inputs, **options)
        return o.detach(), [dx[:, :20] for dx in torch.autograd.grad(o[:, :20].square().sum(), list(inputs.values()))]

    o, gradients = results()
    with torch.no_grad():
        inputs['g'][:, 20] *= 2
    changed, other_gradients = results()
    assert torch.equal(o[:, :20], changed[:, :20])
    assert all(map(torch.equal, gradients, other_gradients))
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
