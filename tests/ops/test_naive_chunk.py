"""The chunkwise form in PyTorch against the recurrence, in float64: what rounding leaves, to the second derivative."""

import pytest
import torch

from fla_longhorn.ops import naive_chunk_longhorn, naive_recurrent_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.ops.cases import run

ALL = dict(D=True, z=True, initial_state=True)
CASES = [
    Case(B=2, T=1, K=3, V=5, initial_state=True),
    # a chunk more and less than full
    Case(B=2, T=35, K=4, V=6, scale=0.5, **ALL),
    Case(B=1, T=48, H=3, K=5, V=3, scalar_beta=True, sigmoid=True, allow_neg_eigval=True, initial_state=True),
    Case(B=2, T=35, K=4, V=6, g='head', sigmoid=True, **ALL),
    Case(B=2, T=35, K=4, V=6, g='channel', allow_neg_eigval=True, state_v_first=True, **ALL),
    Case(B=2, T=20, K=4, V=6, g='channel', lowest=-200., scalar_beta=True, initial_state=True),
    Case(H=2, K=4, V=6, g='head', scalar_beta=True, **ALL).packed(5, 0, 33, 16, 1),
    Case(H=2, K=4, V=6, state_v_first=True, sigmoid=True, **ALL).packed(17, 33, 0),
]


def doubles(case: Case) -> dict[str, torch.Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in make_inputs(case).items()}


@pytest.mark.parametrize('case', CASES, ids=str)
def test_outputs_and_gradients(case, exact):
    inputs, options = doubles(case), make_options(case, exact=exact)
    expected, got = (run(op, inputs, options) for op in (naive_recurrent_longhorn, naive_chunk_longhorn))
    for name, x in expected.items():
        assert got[name].dtype == x.dtype and relative_error(got[name], x) < 1e-12, name


@pytest.mark.parametrize('g', ['head', 'channel'])
def test_a_decay_to_zero(g, exact):
    """Nothing of what was before is left, and no gradient is NaN."""
    inputs = doubles(Case(B=1, T=40, H=1, K=4, V=6, g=g, initial_state=True))
    reset = inputs['g'].detach().index_fill(1, torch.tensor([3, 4, 20]), float('-inf'))
    inputs['g'] = reset.requires_grad_()
    expected, got = (
        run(op, inputs, dict(exact=exact, output_final_state=True)) for op in (naive_recurrent_longhorn, naive_chunk_longhorn)
    )
    assert all(relative_error(got[name], x) < 1e-12 for name, x in expected.items())
    assert not got['dv'][:, 0].isnan().any() and got['dinitial_state'].any()


def test_second_derivatives(exact):
    case = Case(B=1, T=18, H=1, K=2, V=2, g='channel', initial_state=True)
    inputs, options, found = doubles(case), make_options(case, exact=exact), []
    for op in (naive_recurrent_longhorn, naive_chunk_longhorn):
        o, state = op(**inputs, **options)
        first = torch.autograd.grad(o.square().sum() + state.square().sum(), list(inputs.values()), create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), list(inputs.values())))
    assert all(relative_error(b, a) < 1e-11 for a, b in zip(*found, strict=True))


@pytest.mark.parametrize('lengths', [None, (70, 0, 9)])
def test_intermediate_states(lengths, exact):
    case = Case(B=2, T=70, K=4, V=3, g='head', state_v_first=True)
    case = case if lengths is None else case.packed(*lengths)
    inputs, options = doubles(case), make_options(case, exact=exact)
    expected, got = (
        op(**inputs, **options, return_intermediate_states=True)[2] for op in (naive_recurrent_longhorn, naive_chunk_longhorn)
    )
    assert got.shape == expected.shape and relative_error(got, expected) < 1e-12


def test_dtypes_and_errors():
    inputs = make_inputs(Case(K=4, V=6, dtype=torch.bfloat16))
    o, state = naive_chunk_longhorn(**inputs, output_final_state=True)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    with pytest.raises(ValueError, match='cp_context must be None in the naive op'):
        naive_chunk_longhorn(**inputs, cp_context=object())
    with pytest.raises(ValueError, match='k must have shape'):
        naive_chunk_longhorn(**inputs | {'k': inputs['k'][:, 1:]})
