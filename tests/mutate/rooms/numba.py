"""Mutations of the Numba backend; one in a compiled loop costs its compilation."""

from tests.mutate.mutation import Mutation

FLAGS = 'tests/ops/test_longhorn.py::test_flags'
PACKED = 'tests/ops/test_longhorn.py::test_packed'
GATE = 'tests/ops/test_gate.py'
DECAYS = f'{GATE}::test_outputs_and_gradients'
THREADS = 'packages/cpu/tests/longhorn/test_threads.py::test_two_threads_equal_one'
MIXER = 'packages/cpu/tests/longhorn/test_mixer.py'
PARTS = 'packages/cpu/tests/longhorn/test_parts.py'
OPS = 'tests/ops/test_longhorn.py'

MUTATIONS = [
    Mutation(
        'project-of-the-layer', 'layers/longhorn.py', 'self.k_norm(self.by_heads(k)),', 'self.k_norm(self.by_heads(-k)),',
        'prompts store under other keys than decoded tokens', f'{MIXER}::test_decoding_takes_the_loop', 'paper',
    ),
    Mutation(
        'project-of-the-loop', 'packages/cpu/fla_longhorn_cpu/mixer.py',
        'project(v, weight[R * d:], none, k, N, d, H * K)', 'project(v, weight[R * d:], none, k, N, d, H * K)\n    k[:] = -k',
        'decoded tokens store under other keys than prompts', f'{MIXER}::test_decoding_takes_the_loop', 'paper',
    ),
    Mutation(
        'dbeta-of-one-block', 'packages/cpu/fla_longhorn_cpu/backend.py', 'dbeta = add_parts(dbeta)', 'dbeta = dbeta[0]',
        "a head's dbeta lacks all blocks of channels but the first", THREADS, 'scalar_beta diagonal',
    ),
    Mutation(
        'workers-not-awaited', 'packages/cpu/fla_kit/numba/threads.py', 'for _ in range(n_w)]:', 'for _ in range(1)]:',
        'a call ends before its other threads do',
        'packages/cpu/tests/longhorn/test_threads.py::test_a_failure_is_raised_after_all_have_ended',
    ),
    Mutation(
        'skipped-residual', 'packages/cpu/fla_longhorn_cpu/forward.py',
        'for j in range(K):\n        diagonal_key(S, p_old + j * W, p_new + j * W, k, p_k + j, b_v, b_eps, b_decay)',
        'for j in range(K):\n        diagonal_key(S, p_old + j * W, p_new + j * W, k, p_k + j, b_v, b_v, b_decay)',
        'backward computes other states than forward had', FLAGS, 'numba diagonal chunk V12]',
    ),
    Mutation(
        'rounding', 'packages/cpu/fla_kit/numba/memory.py', 'builder.add(odd, constant(ints, 0x7fff))',
        'constant(ints, 0x8000)',
        'bfloat16 is rounded up from halfway', 'packages/cpu/tests/longhorn/test_bfloat16.py::test_rounding_is_that_of_torch',
    ),
    Mutation(
        'saved-at-the-wrong-tokens', 'packages/cpu/fla_longhorn_cpu/forward.py', 'and (t - bos) % C == 0', 'and t % C == 0',
        "states are saved where the row's intervals start, not the sequence's", PACKED, 'numba diagonal chunk V9',
    ),
    Mutation(
        'doubled-norm-slope', 'packages/cpu/fla_longhorn_cpu/backward.py', 'half = HALF if options[1] else ONE', 'half = ONE',
        'the gradient of a key takes a doubled step for a single one', FLAGS, 'numba exact chunk allow_neg_eigval',
    ),
    Mutation(
        'undecayed-gradient', 'packages/cpu/fla_longhorn_cpu/backward.py', 'b_g1 = decayed(b_dp, b_decay) + ',
        'b_g1 = b_dp + ',
        'gradients of earlier tokens do not decay', DECAYS, 'numba exact chunk B2',
    ),
    Mutation(
        'dg-of-one-block', 'packages/cpu/fla_longhorn_cpu/backend.py', '(add_parts(dg) if args.g.dim() == 3 else dg)',
        '(dg[0] if g.dim() == 3 else dg)', "a head's dg lacks all blocks of channels but the first", DECAYS,
        'numba diagonal chunk V300',
    ),
    Mutation(
        'undecayed-start', 'packages/cpu/fla_longhorn_cpu/backward.py', 'b_eps * (b_v - decayed(b_x, b_decay))',
        'b_eps * (b_v - b_x)',
        'backward computes other states than forward had', DECAYS, 'numba exact chunk K64',
    ),
    Mutation(
        'fused-decay', 'packages/cpu/fla_kit/numba/simd.py', 'builder.fmul(*args)\n',
        "builder.fmul(*args, flags=('contract',))\n",
        'a decay of one rounds otherwise than none',
        'packages/cpu/tests/longhorn/test_gate.py::test_no_decay_changes_nothing_in_compiled_loops',
    ),
    Mutation(
        'lowest-decay', 'packages/cpu/fla_kit/numba/simd.py',
        'builder.select(is_low, constant(kind, 0.0), y)', 'y', 'a decay of zero leaves 1e-38 of the state',
        f'{GATE}::test_a_decay_of_zero_forgets_all',
        'numba',
    ),
    Mutation(
        'decay-of-the-next-token', 'packages/cpu/fla_longhorn_cpu/forward.py',
        'b_decay = decay_at(gate, s_decay, t * W)\n            b_u',
        'b_decay = decay_at(gate, s_decay, min(t + 1, L - 1) * W)\n            b_u',
        'outputs depend on a later decay', f'{GATE}::test_a_later_decay_changes_no_earlier_bit', 'numba exact',
    ),
    Mutation(
        'sums-by-the-call', 'packages/cpu/fla_longhorn_cpu/forward.py', 'b_part = b_part + load_one(k, p_k + j) * load(S',
        'b_x = b_x + load_one(k, p_k + j) * load(S',
        'the exact update of a token has other bits at the start of a call', 'packages/extras/tests/test_batch_invariant.py',
        'token_by_token exact float32',
    ),
    Mutation(
        'taps-by-the-call', 'packages/cpu/fla_cpu/loops.py',
        'b_w0 * b_x + b_w1 * b_x1 + b_w2 * b_x2 + b_w3 * b_x3\n            store(y, i + d',
        'b_w3 * b_x3 + b_w2 * b_x2 + b_w1 * b_x1 + b_w0 * b_x\n            store(y, i + d',
        'the convolution of a token has other bits in decoding', 'packages/extras/tests/test_batch_invariant.py',
        'token_by_token paper float32',
    ),
    Mutation(
        'one-row-twice', 'packages/cpu/fla_longhorn_cpu/mixer.py', 'p, p_next = n * D, min(n + 1, N - 1) * D',
        'p, p_next = n * D, n * D',
        'a product gives every second row what the row before it has', f'{MIXER}::test_equals_the_recurrence_in_float64',
        'paper 2 float32',
    ),
    Mutation(
        'decay-without-bias', 'packages/cpu/fla_longhorn_cpu/mixer.py',
        'x = load_one(projected, p) + load_one(dt_bias, p % M)',
        'x = load_one(projected, p)', 'decays in decoding lack their bias', f'{MIXER}::test_equals_the_recurrence_in_float64',
        'gate 1 float32',
    ),
    Mutation(
        'hooks-unseen-in-decoding', 'packages/cpu/fla_longhorn_cpu/token.py',
        'if not runs(linear, nn.Linear) or linear.bias is not None:', 'if linear.bias is not None:',
        'decoding passes by adapters, hooks and other forwards', f'{PARTS}::test_modules', 'x_proj',
    ),
    Mutation(
        'bias-unseen-in-decoding', 'packages/cpu/fla_longhorn_cpu/token.py',
        'if not runs(linear, nn.Linear) or linear.bias is not None:', 'if not runs(linear, nn.Linear):',
        'decoding leaves out a bias that somebody added', f'{PARTS}::test_modules', 'x_proj bias',
    ),
    Mutation(
        'methods-unseen-in-decoding', 'packages/cpu/fla_longhorn_cpu/token.py',
        'if not has_own_methods(cast(Any, type(layer))) or ', 'if ', "decoding passes by a subclass's methods",
        'packages/cpu/tests/longhorn/test_token.py::test_overridden_methods',
    ),
    Mutation(
        'softplus-beyond-88', 'packages/cpu/fla_longhorn_cpu/mixer.py',
        'max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))', 'np.log1p(np.exp(x))',
        'a large input of the gate forgets all', f'{MIXER}::test_softplus_of_large_numbers',
    ),
    Mutation(
        'strided-as-dense', 'packages/cpu/fla_longhorn_cpu/backend.py', '.resolve_neg().contiguous()', '.resolve_neg()',
        'strided inputs are passed to loops of dense ones', f'{OPS}::test_strided_inputs', 'numba',
    ),
]
