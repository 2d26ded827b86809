"""The ops of every backend against the naive one in float64: outputs and all gradients."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fla_longhorn.ops import (
    chunk_longhorn,
    fused_recurrent_longhorn,
    longhorn_state_update,
    naive_recurrent_longhorn,
    operator,
)
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING
from tests.ops.cases import TOLERANCE, assert_close, check, interpreted, reference, run

OPS = {'chunk': chunk_longhorn, 'fused_recurrent': fused_recurrent_longhorn}
INTERVAL = checkpoint_interval(4)
# the interpreter takes a time in proportion to batch, heads and tokens
BATCH = 1 if INTERPRETING else 2

pytestmark = pytest.mark.usefixtures('backend', 'poison')


@pytest.fixture(params=list(OPS))
def op(request):
    return OPS[request.param]


# B, T, H, K, V; the last ones shorter where kernels are interpreted
SHAPES = [Case(*sizes) for sizes in (
    (1, 1, 1, 1, 1), (1, 2, 1, 3, 5),
    (BATCH + 1, INTERVAL - 1, 1, 4, 33), (BATCH, INTERVAL, 2, 4, 32), (1, INTERVAL + 1, 2 * BATCH - 1, 4, 64),
    *(
        ((1, 17, 1, 16, 130), (1, 37, 1, 17, 9), (1, 17, 1, 64, 34), (1, 9, 1, 130, 3), (1, 3, 1, 256, 36))
        if INTERPRETING else
        ((1, 200, 1, 16, 130), (1, 137, 2, 17, 9), (1, 260, 1, 64, 34), (1, 60, 1, 130, 70), (1, 70, 1, 256, 12))
    ),
)]


@pytest.mark.parametrize('case', SHAPES, ids=str)
def test_shapes(op, exact, case, device):
    check(op, replace(case, initial_state=True), device, exact)


FLAGS = [
    Case(
        B=BATCH, T=35, H=BATCH, K=4, V=12, scalar_beta=scalar, sigmoid=sigmoid, D=D, z=z, initial_state=h0,
        state_v_first=v_first, scale=scale, allow_neg_eigval=neg,
    )
    for scalar, sigmoid, D, z, h0, v_first, scale, neg in (
        (False, False, False, False, False, False, None, False),
        (False, True, True, True, True, False, None, False),
        (False, True, False, True, False, True, 0.25, False),
        (True, False, True, False, True, True, 2.0, False),
        (True, True, True, True, True, False, None, False),
        (True, True, False, False, False, False, -1.0, False),
        (False, False, True, True, True, True, 0.0, False),
        (False, False, True, True, True, True, None, True),
        (False, True, True, True, True, False, 0.5, True),
        (True, False, False, True, True, False, None, True),
        (True, True, True, False, True, True, None, True),
    )
]


# each option with and without
@pytest.mark.parametrize('case', interpreted((0, 3, 8, 10), *FLAGS), ids=str)
def test_flags(op, exact, case, device):
    check(op, case, device, exact)


@pytest.mark.parametrize('case', interpreted((2, 5), *(
    replace(FLAGS[i], dtype=dtype) for i in (1, 4, 7, 10) for dtype in (torch.float16, torch.bfloat16)
)), ids=str)
def test_low_precision(op, exact, case, device):
    check(op, case, device, exact)


def test_mixed_dtypes(op, exact, device):
    """Each input keeps its own dtype, as autocast hands them over: projections in bfloat16, D in float32; and a state."""
    dtypes = dict(q=torch.bfloat16, k=torch.float16, beta=torch.bfloat16, initial_state=torch.bfloat16)
    case = Case(K=4, D=True, z=True, initial_state=True, dtypes=tuple(dtypes.items()))
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    got = run(op, inputs, options)
    assert {name: got[f'd{name}'].dtype for name in inputs} == {name: x.dtype for name, x in inputs.items()}
    assert got['o'].dtype == got['final_state'].dtype == torch.float32
    ref = reference(inputs, options)
    for name in ref:
        dtype = inputs[name.removeprefix('d')].dtype if name.removeprefix('d') in inputs else torch.float32
        assert relative_error(got[name], ref[name]) <= TOLERANCE[dtype][0 if name in ('o', 'final_state') else 1], name


PACKED = [
    (5, 1, 12),
    (INTERVAL, 0, 1, INTERVAL + 1, 0),
    (0, 3),
    (BATCH * INTERVAL + 3, 1, 1, 7),
]


@pytest.mark.parametrize('case', interpreted((0, 5), *(case.packed(*lengths) for case in (
    Case(H=BATCH, K=4, V=9, initial_state=True),
    Case(H=1, K=3, V=33, D=True, z=True, sigmoid=True, scalar_beta=True, initial_state=True, state_v_first=True),
) for lengths in PACKED)), ids=str)
def test_packed(op, exact, case, device):
    check(op, case, device, exact)


@given(T=st.integers(2, 18 if INTERPRETING else 2 * INTERVAL + 2), data=st.data())
def test_split_is_whole(op, exact, device, T, data):
    """Stopping anywhere and going on from the state changes neither outputs nor gradients."""
    case = Case(B=1, T=T, H=1, K=4, V=5, D=True, z=True, sigmoid=True, initial_state=True)
    t = data.draw(st.integers(1, T - 1))
    inputs, options = make_inputs(case, device), make_options(case, device, exact)

    def split(q, k, v, beta, z, initial_state, D, **options):
        first, second = ([x[:, s] for x in (q, k, v, beta)] for s in (slice(0, t), slice(t, None)))
        o_1, state = op(*first, z=z[:, :t], initial_state=initial_state, D=D, **options)
        o_2, state = op(*second, z=z[:, t:], initial_state=state, D=D, **options)
        return torch.cat([o_1, o_2], 1), state

    assert_close(run(split, inputs, options), reference(inputs, options), case.dtype)


@given(
    T=st.integers(1, INTERVAL + 3), K=st.integers(1, 9), V=st.integers(1, 40), H=st.integers(1, 3),
    flags=st.tuples(*[st.booleans()] * 6),
)
def test_any_shape(op, exact, device, T, K, V, H, flags):
    scalar_beta, sigmoid, D, z, initial_state, state_v_first = flags
    check(op, Case(
        B=1, T=T, H=H, K=K, V=V, scalar_beta=scalar_beta, sigmoid=sigmoid, D=D, z=z,
        initial_state=initial_state, state_v_first=state_v_first,
    ), device, exact)


@given(
    size=st.sampled_from([0.0, 1e-4, 1.0, 100.0, 1e4]), beta=st.sampled_from([0.0, 1e-6, 0.5, 1.0]),
    T=st.sampled_from([1, 2, INTERVAL, INTERVAL + 1]),
)
def test_extreme_values(op, exact, device, size, beta, T):
    """k = 0 or huge, beta at both ends: all finite, and as exact as the reference rounded to float32."""
    case = Case(B=1, T=T, H=1, K=4, V=6, initial_state=True)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    with torch.no_grad():
        inputs['k'] *= size
        inputs['beta'].fill_(beta)
    got, ref = run(op, inputs, options), reference(inputs, options)
    if size < 100:
        assert_close(got, ref, case.dtype)
    else:
        # 1 - eps k^2 cancels, so that what remains is known to the rounding of the terms it came from
        assert relative_error(got['o'], ref['o']) <= 1e-4
        assert all(torch.isfinite(x).all() for x in got.values())


@pytest.mark.parametrize('logit', [-1e4, -100.0, 100.0, 1e4])
def test_extreme_logits(op, exact, device, logit):
    """Logits far beyond where a float32 sigmoid is 0 or 1, among ordinary ones: nothing overflows."""
    case = Case(B=1, T=9, H=1, K=4, V=6, sigmoid=True, initial_state=True)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    with torch.no_grad():
        inputs['beta'][:, ::2] = logit
    got, ref = run(op, inputs, options), reference(inputs, options)
    assert_close(got, ref, case.dtype)
    assert got['dbeta'][:, ::2].abs().max() <= 1e-30


def test_repeats_are_bit_equal(op, exact, device):
    case = Case(
        B=BATCH, T=BATCH * INTERVAL + 5, H=BATCH, K=4, V=70, D=True, z=True, scalar_beta=True, initial_state=True,
    )
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    first, second = (run(op, inputs, options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_strided_inputs(op, exact, device):
    """Slices of larger tensors, transposed and expanded ones: the usual way to meet a stride bug."""
    B, T, H, K, V = 2, 19, 2, 4, 6
    wide = torch.randn(B, T, 2 * H * V + 7, device=device)
    keys = torch.randn(B, H, T, 2 * K + 3, device=device)
    inputs = {
        'q': keys[..., :K].transpose(1, 2),
        'k': keys[..., K + 1:2 * K + 1].transpose(1, 2),
        'v': wide[..., 3:3 + H * V].unflatten(-1, (H, V)),
        'beta': torch.rand(1, 1, H, V, device=device).expand(B, T, H, V),
        'z': wide[..., -H * V:].unflatten(-1, (H, V)),
        'g': (-torch.rand(B, T, 2 * H, device=device))[..., ::2],
        'D': torch.randn(V, H, device=device).T,
        'initial_state': torch.randn(B, V, K, H, device=device).permute(0, 3, 2, 1),
    }
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    assert not any(x.is_contiguous() for x in inputs.values())
    options = make_options(Case(), exact=exact)
    got, ref = run(op, inputs, options), reference(inputs, options)
    assert_close(got, ref, torch.float32)


def test_no_final_state_unless_asked(op, exact, device):
    inputs = make_inputs(Case(K=4), device)
    o, state = op(**inputs, exact=exact)
    assert state is None
    assert torch.equal(o, op(**inputs, exact=exact, output_final_state=True)[0])


def test_saved_for_backward(op, exact, device):
    """Inputs and coarse states, at most 1.15 times the inputs' bytes for K = 16 in bfloat16."""
    case = Case(B=1, T=128 if INTERPRETING else 256, H=1, K=16, V=64, dtype=torch.bfloat16, sigmoid=True)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.__setitem__(x.data_ptr(), x.untyped_storage().nbytes()) or x, lambda x: x,
    ):
        op(**inputs, **options)
    given = sum(x.untyped_storage().nbytes() for x in inputs.values())
    assert given <= sum(saved.values()) <= 1.15 * given


@pytest.mark.parametrize('wanted', interpreted((1, 4, 8), 'D', 'z', 'v', 'beta', 'initial_state', 'q', 'k', 'D+z', 'v+beta'))
def test_gradients_of_some_inputs(op, wanted, exact, device):
    """Whichever input asks for a gradient, backward has the states that it starts from."""
    case, wanted = Case(B=1, T=35, H=1, K=4, V=6, D=True, z=True, initial_state=True), wanted.split('+')
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    expected = run(op, inputs, options)
    some = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.items()}
    got = run(op, some, options)
    assert all(torch.equal(got[f'd{name}'], expected[f'd{name}']) for name in wanted)
    assert all(got[f'd{name}'] is None for name in some if name not in wanted)


@pytest.mark.parametrize(('K', 'size'), interpreted((0, 4), (1, 30.0), (16, 1e2), (16, 1e6), (16, 1e12), (16, 1e17)))
def test_large_keys(op, exact, K, size, device):
    """Keys need no normalisation: the documented range, and which gradients underflow float32 in it.

    With K = 1 `1 - eps k^2` cancels; up to |k| of 30 every bound holds all the same.
    """
    case = Case(B=1, T=20, H=1, K=K, V=8, initial_state=True)
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    inputs['k'] = (inputs['k'].detach().clamp(-1, 1) * size).requires_grad_()
    got, ref = run(op, inputs, options), reference(inputs, options)
    names = ['o', 'final_state', 'dq', 'dv', 'dinitial_state']
    names += ['dk'] if size <= 1e6 else []
    names += ['dbeta'] if size <= 1e3 else []
    assert_close({name: got[name] for name in names}, {name: ref[name] for name in names}, torch.float32)
    assert all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize('size', [1e19, 1e30])
def test_too_large_keys(op, exact, size, device, backend):
    """Beyond the documented range a token's step is not taken for zero: NaN on the CPU; the kernels leave it out."""
    case = Case(B=1, T=3, H=1, V=8, initial_state=True)
    inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
    # the interpreter divides by what is zero to a GPU
    size = max(size, 2e19) if backend == 'triton' else size
    inputs['k'][:, 1] *= size / inputs['k'][:, 1].norm()
    o, state = op(**inputs, output_final_state=True, exact=exact)
    if backend == 'triton':
        rest = {name: x if name == 'initial_state' else x[:, ::2] for name, x in inputs.items()}
        expected, state_expected = op(**rest, output_final_state=True, exact=exact)
        assert_close({'o': o[:, ::2], 'final_state': state}, {'o': expected, 'final_state': state_expected}, torch.float32)
        return
    assert o[:, 1:].isnan().all() and state.isnan().any()
    token = {name: x[:, 1:2] for name, x in inputs.items() if name != 'initial_state'}
    with torch.no_grad():
        assert longhorn_state_update(inputs['initial_state'], **token, exact=exact).isnan().all()
        assert naive_recurrent_longhorn(**token, initial_state=state.nan_to_num(), exact=exact)[0].isnan().all()


@pytest.mark.parametrize('case', [
    Case(B=BATCH, T=64, H=BATCH, K=4, V=5, scalar_beta=True, state_v_first=True),
    Case(H=BATCH, K=4, V=5, initial_state=True).packed(32, 0, 70, 1),
], ids=str)
def test_intermediate_states(op, exact, case, device):
    """Those before every 32nd token of each sequence, the first one's among them."""
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    with pytest.raises(ValueError, match='return_intermediate_states must be False where an input needs a gradient'):
        op(**inputs, **options, return_intermediate_states=True)
    inputs = {name: x.detach() for name, x in inputs.items()}
    o, final_state, states = op(**inputs, **options, return_intermediate_states=True)
    assert torch.equal(o, op(**inputs, **options)[0])
    doubles = {name: x.double() for name, x in inputs.items()}
    _, *want = naive_recurrent_longhorn(**doubles, **options, return_intermediate_states=True)
    assert relative_error(final_state, want[0]) <= 1e-5 and relative_error(states, want[1]) <= 1e-5


def test_only_chunk_cuts_time(op, device, monkeypatch):
    """The recurrent operator takes one pass over time on every device."""
    asked = []

    def longhorn_fwd(*inputs):
        asked.append(inputs[-1])
        return inputs[2], None, None, None

    monkeypatch.setattr(operator, 'longhorn_fwd', longhorn_fwd)
    op(**make_inputs(Case(K=4), device))
    assert asked == [op is chunk_longhorn]
