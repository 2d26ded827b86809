"""What the Triton kernels of the exact update (the paper's Theorem 3.1) have of their own."""

from dataclasses import replace

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.autograd import longhorn_fwd
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from tests.devices import slow_but
from tests.ops.cases import TRITON_DEVICE, assert_close, check, interpreted, reference, run
from tests.ops.test_pool import INDICES, Call

if TRITON_DEVICE:
    from fla_longhorn.ops.triton.common import strided_inputs
    from fla_longhorn.ops.triton.device import INTERPRETED
    from fla_longhorn.ops.triton.exact import common

    # bfloat16 holds 5e-3 for every output and gradient, gate and scalar steps included
    LOW_PRECISION = [
        Case(B=1, T=35, H=1, K=4, V=12, dtype=torch.bfloat16, z=True, scalar_beta=True, sigmoid=True, initial_state=True),
        Case(B=1, T=37, H=1, K=16, V=40, dtype=torch.bfloat16, z=True, initial_state=True),
        Case(B=1, T=35, H=1, K=40, V=20, dtype=torch.bfloat16, D=True, z=True, initial_state=True),
        # spans just full, crossed and shared by a partial chunk
        Case(H=1, K=16, V=40, dtype=torch.bfloat16, D=True, z=True, sigmoid=True).packed(33, 5, 40),
        # no gate, which changes when q is loaded, at the sizes that one warp serves
        Case(B=1, T=35, H=1, K=40, V=20, dtype=torch.bfloat16, initial_state=True),
        Case(B=1, T=35, H=1, K=100, V=20, dtype=torch.bfloat16, initial_state=True),
    ]
    # U is kept, with and without logits, decays and what else backward computes from it
    KEPT = [
        Case(H=2, K=16, V=20, dtype=torch.bfloat16, D=True, z=True, sigmoid=True, initial_state=True).packed(33, 0, 5, 40),
        Case(B=1, T=35, H=1, K=40, V=20, dtype=torch.bfloat16, scale=0.5, z=True, state_v_first=True, initial_state=True),
        Case(B=1, T=35, H=1, K=4, V=12, dtype=torch.bfloat16, D=True, initial_state=True),
        Case(B=2, T=33, H=1, K=5, V=12, dtype=torch.bfloat16, g='head', D=True, z=True, sigmoid=True, initial_state=True),
        Case(H=1, K=17, V=5, dtype=torch.bfloat16, g='head', scale=0.5, z=True).packed(31, 2, 0, 40),
        Case(B=1, T=17, H=1, K=4, V=5, dtype=torch.bfloat16, sigmoid=True),
    ]
    # what no kernel keeps, by what it lacks
    NOT_KEPT = {
        'precision': Case(K=4, V=5), 'one step': Case(K=4, V=5, dtype=torch.bfloat16, scalar_beta=True),
        'a decay per channel': Case(K=4, V=5, dtype=torch.bfloat16, g='channel'),
        'wide keys': Case(B=1, T=17, H=1, K=129, V=5, dtype=torch.bfloat16),
        'doubled steps': Case(K=4, V=5, dtype=torch.bfloat16, allow_neg_eigval=True),
    }

    @pytest.mark.parametrize('case', interpreted((0, 1, 3, 5), *LOW_PRECISION), ids=str)
    def test_bfloat16(case, triton_device):
        check(chunk_longhorn, case, triton_device, exact=True)

    @pytest.mark.parametrize('K', [16, pytest.param(64, marks=pytest.mark.slow)])
    @pytest.mark.parametrize('keys', [pytest.param(1, marks=pytest.mark.slow), 3])
    def test_repeated_keys(keys, K, triton_device):
        """Every repetition meets the memory that rounding left: its errors must not add up, in states and in gradients."""
        case = Case(B=1, T=144, H=1, K=K, V=32, dtype=torch.bfloat16)
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device, exact=True)
        which = torch.arange(case.T, device=triton_device) * 5 % keys
        inputs['k'] = inputs['k'].detach()[:, which].requires_grad_()
        assert_close(run(chunk_longhorn, inputs, options), reference(inputs, options), case.dtype)

    @pytest.mark.usefixtures('poison')
    @pytest.mark.parametrize('case', interpreted((0, 2, 4), *KEPT), ids=str)
    def test_updates_are_kept(case, triton_device):
        case = replace(case, disable_recompute=True)
        check(chunk_longhorn, case, triton_device, exact=True)
        assert kept_updates(case, triton_device).shape == (case.B, case.T, case.H, case.V)

    @pytest.mark.parametrize('exact', [True, False], ids=['exact', 'diagonal'])
    @pytest.mark.parametrize('lacking', slow_but(['precision'], NOT_KEPT))
    def test_nothing_changes_where_updates_are_not_kept(lacking, exact, triton_device):
        case = NOT_KEPT[lacking]
        results = []
        for kept in (False, True):
            case = replace(case, disable_recompute=kept)
            inputs, options = make_inputs(case, triton_device), make_options(case, triton_device, exact)
            results.append(run(chunk_longhorn, inputs, options))
        assert all(torch.equal(x, results[1][name]) for name, x in results[0].items())
        assert kept_updates(case, triton_device, exact).numel() == 0

    @pytest.mark.parametrize('lacking', ['parallel', 'save_states', 'exact'])
    def test_updates_are_kept_for_backward_alone(lacking, triton_device):
        case = replace(KEPT[-1], disable_recompute=True)
        options = dict(exact=True, save_states=True, parallel=True)
        assert kept_updates(case, triton_device, **options).numel()
        assert not kept_updates(case, triton_device, **options | {lacking: False}).numel()

    def kept_updates(case, device, exact=True, save_states=True, parallel=True):
        inputs = {name: x.detach() for name, x in make_inputs(case, device).items()}
        args = Arguments(**inputs, **make_options(case, device, exact) | dict(scale=1.0))
        return longhorn_fwd(*args, save_states, parallel)[3]

    CUT = [
        Case(B=2, T=75, H=1, K=4, V=20, D=True, z=True, initial_state=True),
        Case(B=1, T=64, H=1, K=3, V=9, dtype=torch.bfloat16, sigmoid=True),
        Case(H=1, K=3, V=9, scale=0.3, initial_state=True, state_v_first=True).packed(5, 0, 70, 32, 17),
        Case(H=1, K=4, V=9, scalar_beta=True).packed(40, 33),
        # with decays
        Case(B=2, T=33, H=1, K=4, V=3, g='head', D=True, z=True),
        Case(H=2, K=4, V=3, g='channel', initial_state=True).packed(31, 2, 0, 33),
        replace(KEPT[0], K=3, disable_recompute=True),
    ]

    @pytest.fixture
    def cut(monkeypatch):
        """Cut every sequence in time, however short."""
        monkeypatch.setattr(common, 'WARPS_PER_MULTIPROCESSOR', 10**6)
        monkeypatch.setattr(common, 'LEAST_INTERVALS', 1)

    @pytest.mark.usefixtures('cut', 'poison')
    @pytest.mark.parametrize('case', interpreted((0, 2, 4, 5, 6), *CUT), ids=str)
    def test_cut_in_time(case, triton_device):
        """The states first, then all intervals at once."""
        check(chunk_longhorn, case, triton_device, exact=True)

    @pytest.mark.usefixtures('cut', 'poison')
    @pytest.mark.parametrize('rows', ['everything', 'block 0 is null'])
    def test_rows_of_a_pool_cut_in_time(rows, triton_device):
        case = Case(H=1, K=4, V=5, z=True, initial_state=True).packed(31, 0, 35, 9)
        Call(case, True, INDICES[rows], torch.int64, triton_device).check()

    def test_few_warps_and_long_sequences_are_cut(monkeypatch):
        monkeypatch.setattr(common, 'card_of', lambda device: replace(INTERPRETED, multiprocessors=132))
        device = torch.device('cuda')
        assert common.is_split(128, 131072, 128, device)
        # as many sequences as fill the device, or one too short
        assert not common.is_split(8 * 128, 131072, 128, device)
        assert not common.is_split(128, 512, 128, device)

    def test_strided_inputs_are_not_copied(triton_device):
        """As the layer has them: q and k are parts of one projection, z is half of another."""
        B, T, H, K, V = 2, 5, 2, 3, 4
        qk, vz = torch.randn(B, T, 2 * H * K, device=triton_device), torch.randn(B, T, 2 * H * V, device=triton_device)
        q, k = (x.unflatten(-1, (H, K)) for x in qk.chunk(2, -1))
        v, z = (x.unflatten(-1, (H, V)) for x in vz.chunk(2, -1))
        x, strides = strided_inputs(Arguments(q, k, v, torch.randn(B, T, H, device=triton_device), z=z))
        for given, taken in ((q, x.q), (k, x.k), (v, x.v), (z, x.z)):
            assert taken.data_ptr() == given.data_ptr()
        assert strides == {'S_Q': 2 * H * K, 'S_K': 2 * H * K, 'S_V': 2 * H * V, 'S_B': H, 'S_Z': 2 * H * V, 'S_G': 0}
