"""Mutations of the Numba backend; one in a compiled loop costs its compilation."""

from tests.mutate.mutation import Mutation

FLAGS = 'tests/ops/test_longhorn.py::test_flags'
PACKED = 'tests/ops/test_longhorn.py::test_packed'
THREADS = 'tests/ops/numba/test_threads.py::test_two_threads_equal_one'

MUTATIONS = [
    Mutation(
        'dbeta-of-one-block', 'ops/numba/__init__.py', 'dbeta = add_parts(dbeta)', 'dbeta = dbeta[0]',
        "a head's dbeta lacks all blocks of channels but the first", THREADS, 'scalar_beta diagonal',
    ),
    Mutation(
        'workers-not-awaited', 'fla_kit/numba/threads.py', 'for _ in range(n_w)]:', 'for _ in range(1)]:',
        'a call ends before its other threads do',
        'tests/ops/numba/test_threads.py::test_a_failure_is_raised_after_all_have_ended',
    ),
    Mutation(
        'skipped-residual', 'ops/numba/forward.py',
        'for j in range(K):\n        diagonal_key(S, p_old + j * W, p_new + j * W, k, p_k + j, b_v, b_eps)',
        'for j in range(K):\n        diagonal_key(S, p_old + j * W, p_new + j * W, k, p_k + j, b_v, b_v)',
        'backward computes other states than forward had', FLAGS, 'numba diagonal chunk V12]',
    ),
    Mutation(
        'rounding', 'fla_kit/numba/memory.py', 'builder.add(odd, constant(ints, 0x7fff))', 'constant(ints, 0x8000)',
        'bfloat16 is rounded up from halfway', 'tests/ops/numba/test_bfloat16.py::test_rounding_is_that_of_torch',
    ),
    Mutation(
        'saved-at-the-wrong-tokens', 'ops/numba/forward.py', 'and (t - bos) % C == 0', 'and t % C == 0',
        "states are saved where the row's intervals start, not the sequence's", PACKED, 'numba diagonal chunk V9',
    ),
    Mutation(
        'doubled-norm-slope', 'ops/numba/backward.py', 'half = HALF if options[1] else ONE', 'half = ONE',
        'the gradient of a key takes a doubled step for a single one', FLAGS, 'numba exact chunk allow_neg_eigval',
    ),
]
