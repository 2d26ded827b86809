"""Mutations of the exact kernels in the layout of tensor cores, under Triton's interpreter."""

from tests.mutate.mutation import INTERPRET, Mutation

MMA = 'ops/triton/exact/mma/'
LANES = 'tests/ops/triton/test_lanes.py::'
BFLOAT16 = 'tests/ops/test_exact.py::test_bfloat16'

MUTATIONS = [
    Mutation(
        'two-rounds-forward', MMA + 'forward.py', 'tl.static_range(3)', 'tl.static_range(2)',
        "a half's last pair of tokens sees wrong updates of the first", BFLOAT16, 'K16 V40 z', env=INTERPRET,
    ),
    Mutation(
        'two-rounds-backward', MMA + 'common.py', 'tl.static_range(3)', 'tl.static_range(2)',
        "a half's last pair of tokens in reverse sees wrong updates of the others", BFLOAT16, 'K16 V40 z', env=INTERPRET,
    ),
    Mutation(
        'outputs-of-later-updates', MMA + 'operands.py', 'tl.where(o_s >= o_r, b_a, 0.0)', 'b_a',
        'queries read the updates of later tokens of their chunk', LANES + 'test_no_token_reaches_earlier_ones', 'None',
        env=INTERPRET,
    ),
    Mutation(
        'gradients-of-earlier-outputs', MMA + 'reverse.py', "product(b_ybb, b_ab, b_zero, 'bf16')",
        "product(side_by_side(b_za, b_zb, 'bf16'), b_ab, b_zero, 'bf16')",
        "a chunk's second half has gradients of the first one's outputs", LANES + 'test_no_gradient_reaches_later_tokens',
        'None', env=INTERPRET,
    ),
    Mutation(
        'chunks-without-slots', MMA + 'forward.py', 'i_chunk = first_slot(bos, i_n, T, 16, IS_VARLEN) * H + i_h',
        'i_chunk = bos // 16 * H + i_h',
        'a packed sequence reads the keys of another', LANES + 'test_packed_sequences_have_the_bits_of_those_alone', 'None',
        env=INTERPRET,
    ),
    Mutation(
        'skip-of-all-channels', MMA + 'forward.py', 'b_o = b_D * b_v - b_o',
        'b_o = b_D * b_v - b_o + 0.0 * tl.sum(b_v, 0)[None, :]',
        'NaN of a channel reaches those of its block', LANES + 'test_what_a_value_without_a_number_reaches', 'None nan',
        env=INTERPRET,
    ),
    Mutation(
        'reads-without-decay', MMA + 'replay.py', "product(b_h, b_ka, b_zero, 'tf32') * b_ua",
        "product(b_h, b_ka, b_zero, 'tf32')",
        'in the replay keys read the state without the decays since', 'tests/ops/test_branches.py::test_smallest_case',
        'exact in bfloat16', env=INTERPRET,
    ),
    Mutation(
        'decays-of-the-other-half', MMA + 'reverse.py', 'b_xb * b_ub,', 'b_xb * b_ua,',
        "a chunk's second half has the decays of the first", 'tests/ops/test_branches.py::test_smallest_case',
        'exact in bfloat16', env=INTERPRET,
    ),
]
