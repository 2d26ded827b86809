"""Mutations of the Triton backend, under Triton's interpreter but for the launchers that need none."""

from tests.mutate.mutation import INTERPRET, Mutation

SEGMENTS = 'tests/ops/triton/test_segments.py::test_any_number_of_segments'
DECAYS = 'tests/ops/test_gate.py::test_outputs_and_gradients'
BRANCHES = 'tests/ops/test_branches.py::'
SMALLEST = BRANCHES + 'test_smallest_case'

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
    Mutation(
        'gradient-of-g-from-the-first-block-of-k', 'ops/triton/exact/backward_qk.py', 'dg.sum(0).to(g.dtype)',
        'dg[0].to(g.dtype)',
        'the gradient of a decay per head is a sum over the first 64 entries of K', SMALLEST, 'exact decay', env=INTERPRET,
    ),
    Mutation(
        'norm-of-the-first-block-of-k', 'ops/triton/exact/backward_qk.py', 'for i_k in range(0, K, BK):',
        'for i_k in range(0, BK, BK):', 'one step per head has the norm of 64 entries', SMALLEST, 'exact decay', env=INTERPRET,
    ),
    Mutation(
        'end-of-another-row', 'ops/triton/exact/backward_qk.py', 'tl.where(left > BT,', 'tl.where(left >= BT,',
        'a row that fills its spans ends with the state where the next row starts', SMALLEST, 'exact fill', env=INTERPRET,
    ),
    Mutation(
        'end-from-a-spare-slot', 'ops/triton/exact/replay.py', 'is_last = (T_i > 0) & (', 'is_last = (',
        'an unused slot overwrites the state at the end of its sequence', SMALLEST, 'slots decay', env=INTERPRET,
    ),
    Mutation(
        'state-that-stays', 'ops/triton/exact/mma/walk.py', "b_s = product(b_u, b_k, b_s, 'bf16')", 'b_s = b_s',
        'one pass of backward reads the last state at all tokens', 'tests/ops/test_exact.py::test_updates_are_kept',
        'K16', env=INTERPRET,
    ),
    Mutation(
        'updates-of-half-a-chunk', 'ops/triton/exact/mma/forward.py', 'updates, H * V, i_x, o_v, left, V, b_wa, b_wb)',
        'updates, H * V, i_x, o_v, left, V, b_wa, b_wa)',
        "backward gets the first half of a chunk's updates twice", 'tests/ops/test_exact.py::test_updates_are_kept',
        'K16', env=INTERPRET,
    ),
    Mutation(
        'gradient-of-the-state-as-it-lies', 'ops/triton/diagonal/backward.py', 'dht.float().contiguous()', 'dht.float()',
        "segments read beside an expanded gradient of the state",
        'tests/ops/triton/test_segments.py::test_gradient_of_the_state_alone', env=INTERPRET,
    ),
    Mutation(
        'heads-with-room-between', 'ops/triton/common.py', ' and (H == 1 or x.stride(2) == V)', '',
        'heads that lie apart are read as if they did not', BRANCHES + 'test_inputs_with_room_between', 'heads', env=INTERPRET,
    ),
    Mutation(
        'rows-with-room-between', 'ops/triton/common.py',
        'if not dense or (B > 1 and T > 1 and x.stride(0) != T * x.stride(1)):',
        'if not dense:', 'rows that lie apart are read as if they did not', BRANCHES + 'test_inputs_with_room_between', 'rows',
        env=INTERPRET,
    ),
    Mutation(
        'keys-as-far-apart-as-queries', 'ops/triton/diagonal/common.py',
        's_kt=k.stride(1)', 's_kt=q.stride(1)',
        'keys are read where queries would lie', BRANCHES + 'test_inputs_with_room_between', 'diagonal', env=INTERPRET,
    ),
    Mutation(
        'boundaries-as-they-lie', 'ops/triton/common.py', '            x[name] = value.contiguous()\n        elif',
        "            x[name] = value if name == 'cu_seqlens' else value.contiguous()\n        elif",
        'boundaries that lie apart are read as if they did not', BRANCHES + 'test_boundaries_with_room_between', env=INTERPRET,
    ),
    Mutation(
        'first-segments-of-one-row', 'ops/triton/diagonal/backward.py', 'x[::len(x) // args.num_sequences]',
        'x[:args.num_sequences]', 'the gradient of an initial state is that of a segment of another row', SEGMENTS, 'B2',
        env=INTERPRET,
    ),
    Mutation(
        'one-block-a-program', 'ops/triton/diagonal/backward.py',
        'range(0, tl.cdiv(NS * H * NV - tl.program_id(0), tl.num_programs(0)))', 'range(0, 1)',
        'what exceeds the programs that run at a time has no gradient', SMALLEST, 'programs', env=INTERPRET,
    ),
    Mutation(
        'null-row-written', 'ops/triton/slots.py', 'written = used & (last >= 0) & (last != pad_slot_id)',
        'written = used & (last >= 0)', 'the row that stands for none is overwritten',
        'tests/ops/test_pool.py::test_pool_equals_gather_update_scatter', 'diagonal written null', env=INTERPRET,
    ),
]
