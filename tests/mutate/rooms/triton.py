"""Mutations of the Triton backend, under Triton's interpreter but for the launchers that need none."""

from tests.mutate.mutation import INTERPRET, Mutation

SEGMENTS = 'tests/ops/triton/test_segments.py::test_any_number_of_segments'
DECAYS = 'tests/ops/test_gate.py::test_outputs_and_gradients'

MUTATIONS = [
    Mutation(
        'gate-of-another-row', 'ops/triton/diagonal/forward.py', 'tl.load(z + i_b * s_zb', 'tl.load(z + i_b * s_vb',
        "a step reads the gate of another row where rows of v and z lie apart by other distances",
        'tests/ops/test_state_update.py::test_a_token_whose_gate_lies_apart', 'diagonal', env=INTERPRET,
    ),
    Mutation(
        'segments-forward-in-backward', 'ops/triton/diagonal/backward.py', 'args, L=L, reverse=True)',
        'args, L=L, reverse=False)',
        "the state's gradient goes from the first segment to the last", SEGMENTS, '3 K4 V9', env=INTERPRET,
    ),
    Mutation(
        'segments-without-gate', 'ops/triton/diagonal/segments.py', 'b_h = b_decay * (b_h + qs[u] * b_x)',
        'b_h = (1. - ks[u] * (ks[u] * b_eps)) * (b_h + qs[u] * b_x)',
        "the state's gradient passes a segment without the gate's decay", SEGMENTS, '3 H2 ghead',
        env=INTERPRET,
    ),
    Mutation(
        'gradient-of-g-between-blocks-of-k', 'ops/triton/diagonal/backward_steps.py', 'p_u + 3 * PLANE, i_k, NK)',
        'p_u + 3 * PLANE, i_k, 1)',
        'the gradient of g is a sum over the last entries of K only', DECAYS, 'diagonal T21 chunk',
        env=INTERPRET,
    ),
    Mutation(
        'updates-that-stay', 'ops/triton/exact/forward.py', 'b_h, b_u = b_h * b_total[:, None], b_u * b_after',
        'b_h = b_h * b_total[:, None]',
        "a chunk's updates reach its end without the decays of later tokens", DECAYS, 'exact T33 chunk', env=INTERPRET,
    ),
    Mutation(
        'pairs-within-halves', 'ops/triton/exact/backward_qk.py', 'range(doublings(BT))', 'range(doublings(BT) - 1)',
        'queries and keys get no gradient from the other half of a span', DECAYS, 'exact T33 chunk', env=INTERPRET,
    ),
    Mutation(
        'first-part-alone', 'ops/triton/exact/backward_qk.py', 'tl.static_range(PARTS)', 'tl.static_range(1)',
        'sums over channels read half of the digits of states', 'tests/ops/test_exact.py::test_bfloat16', 'K16', env=INTERPRET,
    ),
    Mutation(
        'decay-cancels', 'packages/extras/fla_longhorn_extras/scalar_beta.py', 'others = before + behind',
        'others = squares.sum(-1, keepdim=True) - squares',
        "the decay's logarithm loses its digits at large keys",
        'packages/extras/tests/test_scalar_beta.py::test_no_cancellation',
    ),
    Mutation(
        'doubled-norm-slope', 'ops/triton/common.py', 'return 1 / StepOptions(*OPTIONS).factor', 'return 1',
        'the gradient of a key takes a doubled step for a single one', 'tests/ops/test_longhorn.py::test_flags',
        'exact chunk allow_neg_eigval', env=INTERPRET,
    ),
]
