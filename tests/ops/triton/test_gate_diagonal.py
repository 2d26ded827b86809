"""The diagonal update's Triton kernels with a decay: against the naive operator in float64, by every path that they have."""

from dataclasses import replace

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.diagonal import common, segments
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING
from tests.ops.cases import assert_close, check, reference, run
from tests.ops.test_pool import INDICES, Call

INTERVAL = checkpoint_interval(4)
HALF = torch.bfloat16
FLOAT_GATE = (('g', torch.float32),)
ALL = dict(D=True, z=True, initial_state=True)
LONG = Case(B=1, T=3 * INTERVAL + 6, H=1, K=4, V=9, g='channel', initial_state=True)
PACKED = Case(H=1, K=4, V=5, g='head', **ALL).packed(INTERVAL - 1, 0, INTERVAL + 3, 1, 9)

CASES = [
    # tokens from one to a block of four and beyond
    *(Case(B=2, T=T, H=1, K=4, V=9, g=g, initial_state=True) for T in (1, 3, 6) for g in ('head', 'channel')),
    replace(LONG, H=2, D=True, z=True),
    replace(LONG, g='head', sigmoid=True, scalar_beta=True, state_v_first=True),
    Case(B=1, T=130, H=1, K=16, V=37, g='channel', sigmoid=True, allow_neg_eigval=True, **ALL),
    # two and four blocks of K, whose sums over K go through scratch; two checkpoints
    Case(B=1, T=260, H=1, K=24, V=20, g='channel', z=True, initial_state=True),
    Case(B=1, T=21, H=2, K=24, V=33, g='head', scalar_beta=True, state_v_first=True, scale=0.5, **ALL),
    Case(B=1, T=14, H=1, K=64, V=40, g='channel', allow_neg_eigval=True, scalar_beta=True),
    PACKED,
    replace(PACKED, H=2, K=24, g='channel', state_v_first=True, scalar_beta=True),
    # pairs of 16-bit values, whose decays have either width
    Case(B=1, T=70, H=1, K=16, V=64, g='channel', dtype=HALF, **ALL),
    Case(B=1, T=37, H=2, K=16, V=64, g='channel', dtype=HALF, dtypes=FLOAT_GATE, z=True),
    Case(B=1, T=37, H=2, K=24, V=70, g='head', dtype=HALF, dtypes=FLOAT_GATE, initial_state=True),
    Case(B=1, T=9, H=2, K=5, V=7, g='head', dtype=torch.float16, z=True, initial_state=True),
    # other inputs that are read where they are
    *(Case(B=2, T=9, H=2, K=5, V=8, g='channel', layout=layout, **ALL) for layout in ('strided', 'view', 'shifted')),
]


@pytest.fixture(autouse=True)
def decaying(monkeypatch):
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'triton')


@pytest.fixture
def segment_length(monkeypatch):
    """Choose how many checkpoint intervals of a case a segment has."""
    def choose(case: Case, count: int):
        monkeypatch.setattr(segments, 'choose_segment_length', lambda *args: count * checkpoint_interval(case.K))

    return choose


def with_decays(case, device, g):
    """The inputs of a case with these decays."""
    inputs = make_inputs(case, device)
    with torch.no_grad():
        inputs['g'].copy_(g)
    return inputs


if INTERPRETING or torch.cuda.is_available():
    @pytest.mark.usefixtures('poison')
    @pytest.mark.parametrize('case', CASES, ids=str)
    def test_outputs_and_gradients(case, triton_device):
        check(chunk_longhorn, case, triton_device)

    @pytest.mark.usefixtures('poison')
    @pytest.mark.parametrize('count', [1, 2])
    @pytest.mark.parametrize('case', [
        replace(LONG, H=2, T=2 * INTERVAL + 6),
        replace(LONG, H=2, g='head', D=True, z=True, scalar_beta=True, sigmoid=True, state_v_first=True),
        replace(LONG, dtype=HALF, dtypes=FLOAT_GATE, z=True, V=64, K=3),
        PACKED,
        replace(PACKED, g='channel', allow_neg_eigval=True, state_v_first=True),
    ], ids=str)
    def test_any_number_of_segments(segment_length, count, case, triton_device):
        segment_length(case, count)
        check(chunk_longhorn, case, triton_device)

    @pytest.mark.usefixtures('poison')
    @pytest.mark.parametrize('g', ['head', 'channel'])
    def test_slices_of_segments(segment_length, monkeypatch, g, triton_device):
        """Backward takes a segment in two launches."""
        monkeypatch.setattr(common, 'MIN_SLICED_LENGTH', INTERVAL)
        case = replace(LONG, T=6 * INTERVAL + 9, g=g, D=True)
        segment_length(case, 4)
        check(chunk_longhorn, case, triton_device)

    @pytest.mark.parametrize('kind', [torch.float32, HALF], ids=str)
    @pytest.mark.parametrize('g', [-0.01, -5., -40.])
    @pytest.mark.parametrize('case', [replace(LONG, T=INTERVAL + 9), replace(LONG, T=11, K=24)], ids=str)
    def test_any_decay(segment_length, case, g, kind, triton_device):
        """One for all tokens; its products underflow, and its gradient is as accurate as the others where it is small."""
        segment_length(case, 1)
        case = replace(case, dtype=kind)
        inputs, options = with_decays(case, triton_device, g), make_options(case, triton_device)
        assert_close(run(chunk_longhorn, inputs, options), reference(inputs, options), kind)

    @pytest.mark.parametrize('count', [1, 8])
    @pytest.mark.parametrize('lowest', [-1000., -float('inf')])
    @pytest.mark.parametrize('case', [LONG, replace(LONG, g='head', K=24, T=43)], ids=str)
    def test_resets(segment_length, case, lowest, count, triton_device):
        """Single tokens of which the decay is zero: what came before has no trace, and their g no gradient."""
        segment_length(case, count)
        resets = torch.tensor([0, 5, 8, 17, 32, 33, 42])
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device)
        with torch.no_grad():
            inputs['g'][:, resets] = lowest
        got = run(chunk_longhorn, inputs, options)
        assert_close(got, reference(inputs, options), torch.float32)
        assert not got['dg'][:, resets].any() and got['dg'].any() and not got['dinitial_state'].any()
        later = {name: x[:, 17:] for name, x in inputs.items() if name != 'initial_state'}
        o, final_state = chunk_longhorn(**later, **options)
        if count == 8:
            assert torch.equal(got['o'][:, 17:], o) and torch.equal(got['final_state'], final_state)
        else:
            # segments begin elsewhere
            assert relative_error(got['o'][:, 17:], o) < 1e-6

    @pytest.mark.parametrize('count', [1, 8])
    @pytest.mark.parametrize('case', [
        replace(LONG, z=True, D=True), replace(LONG, g='head', scalar_beta=True, T=19, K=24),
        replace(LONG, T=19, V=64, K=16, dtype=HALF), PACKED,
    ], ids=str)
    def test_no_decay_changes_nothing(segment_length, case, count, triton_device):
        """`g = 0` is no gate, to the bit, gradients among them."""
        segment_length(case, count)
        inputs, options = with_decays(case, triton_device, 0.), make_options(case, triton_device)
        got = run(chunk_longhorn, inputs, options)
        assert got['dg'].any()
        del inputs['g']
        expected = run(chunk_longhorn, inputs, options)
        assert all(torch.equal(got[name], x) for name, x in expected.items())

    @pytest.mark.parametrize('count', [1, 8])
    @pytest.mark.parametrize('g', ['head', 'channel'])
    def test_a_later_decay_changes_no_earlier_bit(segment_length, g, count, triton_device):
        """Of outputs; nor, of a loss on the tokens before, of any gradient."""
        case, t = replace(LONG, g=g), INTERVAL + 7
        segment_length(case, count)
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device)
        h0 = inputs.pop('initial_state')

        def results():
            o, _ = chunk_longhorn(**inputs, initial_state=h0, **options)
            return o.detach(), [dx[:, :t] for dx in torch.autograd.grad(o[:, :t].square().sum(), list(inputs.values()))]

        o, gradients = results()
        for changed in (2 * inputs['g'][:, t], -float('inf')):
            with torch.no_grad():
                inputs['g'][:, t] = changed
            other, other_gradients = results()
            assert torch.equal(o[:, :t], other[:, :t])
            assert all(map(torch.equal, gradients, other_gradients))
            assert not torch.equal(o[:, t:], other[:, t:])

    @pytest.mark.parametrize('T', [1, 5])
    @pytest.mark.parametrize('layout', ['rows apart', 'transposed'])
    @pytest.mark.parametrize('g', ['head', 'channel'])
    def test_strided(g, layout, T, triton_device):
        """Decays as a slice of a wider projection, read in place, and as transposed."""
        case = replace(LONG, B=2, H=2, T=T, g=g)
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device)
        expected = run(chunk_longhorn, inputs, options)
        x = inputs['g'].detach()
        wide = torch.full((2, T, 3 * x[0, 0].numel()), float('nan'), device=triton_device)
        if layout == 'transposed':
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        else:
            wide[..., -x[0, 0].numel():] = x.flatten(2)
            x = wide[..., -x[0, 0].numel():].view(x.shape)
        inputs['g'] = x.requires_grad_()
        got = run(chunk_longhorn, inputs, options)
        assert all(torch.equal(got[name], x) for name, x in expected.items())
        with torch.no_grad():
            # at T = 1 by the kernel of one token
            o, final_state = chunk_longhorn(**inputs, **options)
        assert relative_error(o, expected['o']) < 1e-6 and relative_error(final_state, expected['final_state']) < 1e-6

    @pytest.mark.parametrize('rows', ['all', 'everything', 'block 0 is null'])
    @pytest.mark.parametrize('case', [
        Case(B=4, T=1, H=2, K=5, V=18, g='channel', sigmoid=True, scale=0.5, **ALL),
        Case(B=4, T=1, H=2, K=16, V=70, g='head', dtype=HALF, dtypes=FLOAT_GATE, state_v_first=True, scalar_beta=True, **ALL),
        Case(B=4, T=3, H=1, K=16, V=33, g='channel', **ALL),
        Case(H=1, K=4, V=5, g='head', z=True, initial_state=True).packed(INTERVAL - 1, 0, INTERVAL + 3, 9),
    ], ids=str)
    def test_rows_of_a_pool(segment_length, case, rows, triton_device):
        segment_length(case, 1)
        Call(case, False, INDICES[rows], torch.int64, triton_device).check()

    @pytest.mark.parametrize('g', ['head', 'channel'])
    def test_step_by_step(g, triton_device):
        """Decoding continues what a prompt left."""
        case = replace(LONG, B=2, H=2, T=5, g=g, V=33, K=24)
        inputs = {name: x.detach() for name, x in make_inputs(case, triton_device).items()}
        h = inputs.pop('initial_state')
        o, final_state = fused_recurrent_longhorn(**inputs, initial_state=h, output_final_state=True)
        outputs = []
        for t in range(5):
            token = {name: x[:, t:t + 1] for name, x in inputs.items()}
            o_t, h = fused_recurrent_longhorn(**token, initial_state=h, output_final_state=True)
            outputs.append(o_t)
        assert relative_error(torch.cat(outputs, 1), o) < 1e-6 and relative_error(h, final_state) < 1e-6
