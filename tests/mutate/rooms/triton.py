"""Mutations of the Triton backend, under Triton's interpreter but for the launchers that need none."""

from tests.mutate.mutation import INTERPRET, Mutation

SEGMENTS = 'tests/ops/triton/test_segments.py::test_any_number_of_segments'
EXACT = 'tests/ops/test_exact.py::test_exact_kernels'
TRANSLATION = 'tests/ops/triton/test_scalar_beta.py::test_translation'
POOL = 'tests/ops/test_pool.py::test_pool_equals_gather_update_scatter'

MUTATIONS = [
    Mutation(
        'gate-of-another-row', 'ops/triton/diagonal/step.py', 'tl.load(z + i_b * s_zb', 'tl.load(z + i_b * s_vb',
        "a step reads the gate of another row where rows of v and z lie apart by other distances",
        'tests/ops/test_state_update.py::test_a_token_whose_gate_lies_apart', 'diagonal', env=INTERPRET,
    ),
    Mutation(
        'indices-between-others', 'ops/operator.py', 'pool=pool.contiguous()', 'pool=pool',
        'a column of a table of blocks is read as a row of it', 'tests/ops/test_pool.py::test_a_column_of_a_table_of_blocks',
        env=INTERPRET,
    ),
    Mutation(
        'final-gradient-dropped', 'ops/triton/diagonal/__init__.py', 'decay, local, dht, args.cu_seqlens',
        'decay, local, None, args.cu_seqlens', "segments do not see the final state's gradient", SEGMENTS, '3 V9',
        env=INTERPRET,
    ),
    Mutation(
        'slices-forward-in-backward', 'ops/triton/diagonal/backward.py', 'for i in reversed(range(slices)):',
        'for i in range(slices):', 'the first half of a segment does not see the gradient from the second',
        'tests/ops/triton/test_segments.py::test_slices_of_segments', env=INTERPRET,
    ),
    Mutation(
        'segments-forward-in-backward', 'ops/triton/diagonal/__init__.py', 'T=T, L=L, reverse=True)',
        'T=T, L=L, reverse=False)',
        "the state's gradient goes from the first segment to the last", SEGMENTS, '3 V9', env=INTERPRET,
    ),
    Mutation(
        'initial-state-after-segments', 'ops/triton/diagonal/__init__.py', 'decay, local, h0, args.cu_seqlens',
        'decay, local, None, args.cu_seqlens', 'segments do not see the initial state', SEGMENTS, '3 V9', env=INTERPRET,
    ),
    Mutation(
        'slot-of-the-row', 'ops/triton/slots.py', 'return bos // SIZE + i_n', 'return bos // SIZE',
        'packed sequences write into the same slots', SEGMENTS, '3 V5', env=INTERPRET,
    ),
    Mutation(
        'state-offsets', 'ops/triton/diagonal/common.py', 'return o_k + o_v * K', 'return o_k * V + o_v',
        'the layout of the states is that of the other flag', 'tests/ops/triton/test_segments.py::test_summary', 'True',
        env=INTERPRET,
    ),
    Mutation(
        'given-state-unwritten', 'ops/triton/exact/__init__.py', 'if ht is None and args.output_final_state:',
        'if args.output_final_state:', 'decoding leaves the state as it was', 'tests/ops/test_state_update.py::test_in_place',
        'T1 exact', env=INTERPRET,
    ),
    Mutation(
        'tail-of-one-token', 'ops/triton/exact/forward.py', 'if left > 0:', 'if left > 1:',
        'a single token behind the last chunk is skipped', EXACT, 'T1 True', env=INTERPRET,
    ),
    Mutation(
        'substitution-stops-early', 'ops/triton/exact/common.py', 'tl.static_range(BT - 1, 0, -1)',
        'tl.static_range(BT - 2, 0, -1)',
        "a chunk's last token has no gradient to those before", EXACT, 'T21 True', env=INTERPRET,
    ),
    Mutation(
        'own-residual', 'ops/triton/exact/common.py', 'tl.where((o_t > s)[:, None]', 'tl.where((o_t >= s)[:, None]',
        "a token's residual loses its own update", EXACT, 'T21 True', env=INTERPRET,
    ),
    Mutation(
        'unrounded-updates', 'ops/triton/exact/common.py', 'b_u = kept(b_u, DOT)', 'pass',
        'rounding of updates adds up with every repetition of a key', 'tests/ops/test_exact.py::test_repeated_keys', '1 16',
        env=INTERPRET,
    ),
    Mutation(
        'first-part-alone', 'ops/triton/exact/backward_qk.py', 'tl.static_range(PARTS)', 'tl.static_range(1)',
        'sums over channels read half of the digits of states', 'tests/ops/test_exact.py::test_bfloat16', 'K16', env=INTERPRET,
    ),
    Mutation(
        'state-layout-for-fla', 'ops/triton/scalar_beta.py', 'initial_state = initial_state.mT', 'pass',
        "fla's kernels read the state in the other layout", TRANSLATION, 'diagonal state_v_first',
    ),
    Mutation(
        'values-without-steps', 'ops/triton/scalar_beta.py', '(eps[..., None] * v).to(v.dtype)', 'v',
        'GLA learns with a step size of one', TRANSLATION, 'diagonal V7',
    ),
    Mutation(
        'decay-cancels', 'ops/triton/scalar_beta.py', 'others = before + behind',
        'others = squares.sum(-1, keepdim=True) - squares',
        "the decay's logarithm loses its digits at large keys", 'tests/ops/triton/test_scalar_beta.py::test_no_cancellation',
    ),
    Mutation(
        'float32-sent-to-fla', 'ops/triton/scalar_beta.py', ' or dtype not in (torch.float16, torch.bfloat16)', '',
        "float32 goes to fla's kernels, which round it", 'tests/ops/triton/test_scalar_beta.py::test_route',
    ),
    Mutation(
        'stale-rows', 'ops/triton/slots.py', 'read = used & (tl.load(has_initial_state + i_n) != 0)', 'read = used',
        'a new request starts from what an old one left', POOL, 'triton diagonal T1 zero', env=INTERPRET,
    ),
    Mutation(
        'null-block-is-a-row', 'ops/triton/slots.py', 'used = (first >= 0) & (first != pad_slot_id)', 'used = first >= 0',
        'the null block is updated', POOL, 'triton exact T1 null', env=INTERPRET,
    ),
    Mutation(
        'final-rows-ignored', 'ops/triton/slots.py', 'last = tl.load(final_state_indices + i_n).to(tl.int64)', 'pass',
        'the rows of a shared prefix are overwritten', POOL, 'triton diagonal T1 elsewhere',
        env=INTERPRET,
    ),
    Mutation(
        'rows-next-to-each-other', 'ops/triton/slots.py', 's_h=pool.states.stride(0)', 's_h=size',
        'rows that lie apart are taken for neighbours', POOL, 'triton exact T1 all', env=INTERPRET,
    ),
    Mutation(
        'start-of-segments', 'ops/triton/diagonal/__init__.py', 'reverse=False, pool=pool)', 'reverse=False)',
        'segments start from rows of the batch, not of the pool',
        'tests/ops/triton/test_segments.py::test_segments_of_rows_of_a_pool', env=INTERPRET,
    ),
]
