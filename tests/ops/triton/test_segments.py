"""Time cut into segments: one, two and many give what one pass gives, wherever packed sequences begin and end."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, naive_recurrent_longhorn
from fla_longhorn.ops.checkpoints import checkpoint_interval
from fla_longhorn.ops.triton.diagonal import common, segments
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from tests.ops.cases import TRITON_DEVICE, assert_close, check, reference, run
from tests.ops.test_pool import INDICES, Call

INTERVAL = checkpoint_interval(4)


@pytest.fixture
def segment_length(monkeypatch):
    """Choose the length of the segments; only the Triton backend has any."""
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'triton')

    def choose(length: int):
        monkeypatch.setattr(segments, 'choose_segment_length', lambda *args: length)

    return choose


if TRITON_DEVICE:
    @pytest.mark.usefixtures('poison')
    @pytest.mark.parametrize('count', [pytest.param(1, marks=pytest.mark.slow), 3])
    @pytest.mark.parametrize('case', [
        Case(B=1, T=2 * INTERVAL + 5, H=1, K=4, V=9, initial_state=True),
        Case(B=1, T=2 * INTERVAL, H=1, K=3, V=33, scalar_beta=True, sigmoid=True, D=True, z=True, state_v_first=True),
        Case(H=1, K=4, V=5, D=True, z=True, initial_state=True).packed(INTERVAL - 1, 0, INTERVAL + 3, 1, 9),
        # rows of several segments
        Case(B=2, T=INTERVAL + 3, H=1, K=3, V=5, initial_state=True),
        # heads with room between
        Case(B=1, T=INTERVAL + 3, H=2, K=3, V=5, z=True, layout='view'),
        Case(B=1, T=2 * INTERVAL + 6, H=2, K=4, V=9, g='head', D=True, z=True, scalar_beta=True, state_v_first=True),
        Case(H=1, K=4, V=5, g='channel', initial_state=True, allow_neg_eigval=True).packed(INTERVAL - 1, 0, INTERVAL + 3, 9),
    ], ids=str)
    def test_any_number_of_segments(segment_length, count, case, triton_device):
        segment_length({1: 5 * INTERVAL, 2: 2 * INTERVAL, 3: INTERVAL}[count])
        check(chunk_longhorn, case, triton_device)

    @pytest.mark.usefixtures('poison')
    @pytest.mark.parametrize('case', [
        Case(B=1, T=3 * INTERVAL, H=1, K=3, V=5, D=True, g='channel', scalar_beta=True, z=True, state_v_first=True),
        # of several rows, the last slice of which is shorter
        Case(B=2, T=2 * INTERVAL + 5, H=1, K=3, V=5, D=True, initial_state=True),
    ], ids=str)
    def test_slices_of_segments(segment_length, monkeypatch, case, triton_device):
        """Backward takes a segment in two launches, with one buffer for the sums over channels."""
        monkeypatch.setattr(common, 'MIN_SLICED_LENGTH', INTERVAL)
        segment_length(2 * INTERVAL)
        check(chunk_longhorn, case, triton_device)

    @pytest.mark.parametrize('rows', ['everything', 'block 0 is null'])
    def test_segments_of_rows_of_a_pool(segment_length, rows, triton_device):
        segment_length(INTERVAL)
        case = Case(H=1, K=4, V=5, z=True, initial_state=True).packed(INTERVAL - 1, 0, INTERVAL + 3, 9)
        Call(case, False, INDICES[rows], torch.int64, triton_device).check()

    def test_gradient_of_the_state_alone(segment_length, triton_device):
        """Which is expanded."""
        segment_length(INTERVAL)
        case = Case(B=1, T=INTERVAL + 3, H=1, K=3, V=5, initial_state=True)
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device)
        doubles = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
        for op, x in ((chunk_longhorn, inputs), (naive_recurrent_longhorn, doubles)):
            op(**x, **options)[1].sum().backward()
        assert_close(*({f'd{x}': leaves[x].grad for x in doubles if x != 'q'} for leaves in (inputs, doubles)), case.dtype)

    def test_repeats_are_bit_equal(segment_length, triton_device):
        segment_length(INTERVAL)
        case = Case(B=1, T=INTERVAL + 5, H=1, K=3, V=33, scalar_beta=True, D=True, initial_state=True)
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device)
        first, second = (run(chunk_longhorn, inputs, options) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

    @pytest.mark.parametrize(('count', 'case'), [
        (1, Case(B=1, T=43, H=1, K=4, V=9, g='channel', initial_state=True)),
        (8, Case(B=1, T=43, H=1, K=24, V=9, g='head', initial_state=True)),
    ], ids=str)
    def test_resets(segment_length, case, count, triton_device):
        """Single tokens of which the decay is zero: what came before has no trace, and their g no gradient."""
        segment_length(count * checkpoint_interval(case.K))
        resets = torch.tensor([0, 5, 8, 17, 32, 33, 42])
        inputs, options = make_inputs(case, triton_device), make_options(case, triton_device)
        with torch.no_grad():
            inputs['g'][:, resets] = -float('inf')
        got = run(chunk_longhorn, inputs, options)
        assert_close(got, reference(inputs, options), torch.float32)
        assert not got['dg'][:, resets].any() and got['dg'].any() and not got['dinitial_state'].any()


@pytest.mark.parametrize('K', [1, 16, 256])
def test_segments_are_whole_intervals(K, monkeypatch):
    monkeypatch.setattr(segments, 'card_of', lambda device: SimpleNamespace(multiprocessors=132))
    for T, blocks in product([1, 100, 4096, 131072], [1, 16, 500, 100_000]):
        L = segments.choose_segment_length(T, blocks, K, torch.device('cuda'))
        assert L > 0 and L % checkpoint_interval(K) == 0


@pytest.mark.parametrize(('T', 'blocks', 'rounds', 'shortest', 'longest'), [
    (2048, 8 * 128, 1, 2049, None), (2048, 8 * 128, 2, 2049, None), (200, 1, 1, 200, None), (131072, 48, 1, 1, 131072 // 16),
    # as many programs as a device holds, 8 on each multiprocessor, and in two rounds twice as many
    *((131072, 128, rounds, 131072 // (8 * rounds), 131072 // (8 * rounds)) for rounds in (1, 2)),
], ids=['a filled device', 'in two rounds', 'a short row', 'a long row', 'several programs', 'twice as many'])
def test_when_time_is_cut(T, blocks, rounds, shortest, longest, monkeypatch):
    """Sizes and the multiprocessor count decide, nothing else."""
    monkeypatch.setattr(segments, 'card_of', lambda device: SimpleNamespace(multiprocessors=132))
    L = segments.choose_segment_length(T, blocks, 16, torch.device('cuda'), rounds=rounds)
    assert shortest <= L <= (longest or L)
