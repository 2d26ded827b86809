"""`torch.func` transforms and forward mode: right, by the reference recurrence, or refused in a sentence."""

import pytest
import torch
from torch.autograd import forward_ad

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error

OPS = [chunk_longhorn, fused_recurrent_longhorn]
CASES = [
    Case(B=1, T=4, H=1, K=3, V=2, sigmoid=True, D=True, z=True, initial_state=True, scale=0.5),
    Case(H=1, K=2, V=3, scalar_beta=True, initial_state=True, state_v_first=True).packed(2, 0, 3),
    Case(B=1, T=3, H=1, K=3, V=2, g='channel', allow_neg_eigval=True, initial_state=True),
]
TRANSFORMS = {
    'grad': lambda f, x, dx: torch.func.grad(f)(x),
    'vjp': lambda f, x, dx: torch.func.vjp(f, x)[1](torch.ones(()).to(x))[0],
    'jvp': lambda f, x, dx: torch.func.jvp(f, (x,), (dx,))[1],
    'jacrev': lambda f, x, dx: torch.func.jacrev(f)(x),
    'jacfwd': lambda f, x, dx: torch.func.jacfwd(f)(x),
    'hessian': lambda f, x, dx: torch.func.hessian(f)(x),
    'vmap': lambda f, x, dx: torch.func.vmap(f)(torch.stack([x, dx])),
    'vmap of grad': lambda f, x, dx: torch.func.vmap(torch.func.grad(f))(torch.stack([x, dx])),
    'forward_ad': lambda f, x, dx: tangent(f, x, dx),
}


def tangent(f, x, dx):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, dx))).tangent


def scalar(op, name, inputs, options):
    """A number from both outputs, as a function of the input `name`."""
    def function(x):
        o, final_state = op(**{**inputs, name: x}, **options)
        return (o * o).sum() + o.sum() + (final_state * final_state).sum()
    return function


@pytest.mark.filterwarnings('ignore:.*batching rule')
@pytest.mark.parametrize('transform', list(TRANSFORMS))
@pytest.mark.parametrize('op, case', [(OPS[0], CASES[0]), (OPS[1], CASES[1]), (OPS[0], CASES[2])], ids=[
    'chunk, gated', 'recurrent, packed', 'chunk, decaying',
])
def test_equals_the_naive_op(op, case, transform, exact, device):
    options = make_options(case, device, exact)
    inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
    doubles = {name: x.double() for name, x in inputs.items()}
    for name, x in inputs.items():
        dx = torch.randn_like(x)
        got = TRANSFORMS[transform](scalar(op, name, inputs, options), x, dx)
        ref = TRANSFORMS[transform](scalar(naive_recurrent_longhorn, name, doubles, options), x.double(), dx.double())
        assert relative_error(got, ref) <= 1e-4, name


@pytest.mark.parametrize('op', OPS, ids=lambda op: op.__name__)
def test_a_second_backward_is_refused(op, exact, device):
    inputs, options = make_inputs(CASES[0], device), make_options(CASES[0], device, exact)
    o, _ = op(**inputs, **options)
    (dk,) = torch.autograd.grad(o.square().sum(), inputs['k'], create_graph=True)
    with pytest.raises(RuntimeError, match='no second derivative .* call naive_recurrent_longhorn'):
        dk.sum().backward()


def test_state_update_is_refused(device):
    inputs = {name: x.detach() for name, x in make_inputs(Case(T=1, initial_state=True), device).items()}
    state = inputs.pop('initial_state')

    def update(v):
        return longhorn_state_update(state, **{**inputs, 'v': v})

    with torch.no_grad(), pytest.raises(ValueError, match='longhorn_state_update updates states in place, which forward mode'):
        tangent(update, inputs['v'], inputs['v'])
    with pytest.raises(ValueError, match='longhorn_state_update updates states in place'):
        torch.func.jvp(update, (inputs['v'],), (inputs['v'],))
    with torch.no_grad(), pytest.raises(ValueError, match=r'longhorn_state_update .* torch.func.*fused_recurrent_longhorn'):
        torch.vmap(lambda state: longhorn_state_update(state, **inputs))(torch.stack([state, state]))


def test_a_tangent_elsewhere_changes_nothing(device, exact):
    """Within a level of forward mode, inputs without a tangent go to the operators as ever."""
    inputs = {name: x.detach() for name, x in make_inputs(CASES[0], device).items()}
    options = make_options(CASES[0], device, exact)
    expected = chunk_longhorn(**inputs, **options)[0]
    with forward_ad.dual_level():
        assert torch.equal(chunk_longhorn(**inputs, **options)[0], expected)
