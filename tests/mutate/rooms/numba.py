"""Mutations of the Numba backend; one in a compiled loop costs its compilation."""

from tests.mutate.mutation import Mutation

FLAGS = 'tests/ops/test_longhorn.py::test_flags'
PACKED = 'tests/ops/test_longhorn.py::test_packed'
SHAPES = 'tests/ops/test_longhorn.py::test_shapes'
THREADS = 'tests/ops/numba/test_threads.py::test_two_threads_equal_one'
POOL = 'tests/ops/test_pool.py::test_pool_equals_gather_update_scatter'

MUTATIONS = [
    Mutation(
        'dbeta-of-one-block', 'ops/numba/__init__.py', 'dbeta = add_parts(dbeta)', 'dbeta = dbeta[0]',
        "a head's dbeta lacks all blocks of channels but the first", THREADS, 'scalar_beta diagonal',
    ),
    Mutation(
        'worker-missing', 'fla_cpu/numba/threads.py',
        'loop, workers.popleft(), n_w', 'loop, min(workers.popleft(), n_w - 2), n_w',
        "the last worker's blocks have no output and no gradients", THREADS, 'sigmoid diagonal',
    ),
    Mutation(
        'workers-not-awaited', 'fla_cpu/numba/threads.py', 'for _ in range(n_w)]:', 'for _ in range(1)]:',
        'a call ends before its other threads do',
        'tests/ops/numba/test_threads.py::test_a_failure_is_raised_after_all_have_ended',
    ),
    Mutation(
        'threads-after-main', 'fla_cpu/numba/threads.py', 'with suppress(RuntimeError):', 'with suppress(OSError):',
        'operators fail in a handler of atexit', 'tests/ops/numba/test_threads.py::test_after_the_main_thread',
    ),
    Mutation(
        'denormals-of-one-thread', 'fla_cpu/numba/threads.py', '        torch.set_flush_denormal(flushes)\n', '',
        'a result depends on the thread that computes it',
        'tests/ops/numba/test_threads.py::test_every_thread_flushes_denormals_as_the_caller_does',
    ),
    Mutation(
        'final-state-in-the-default-dtype', 'ops/numba/__init__.py',
        '        final_state = torch.empty((N, H, K, V) if output_final_state and pool is None else 0, **FLOAT32)\n',
        '        final_state = torch.empty((N, H, K, V) if output_final_state and pool is None else 0)\n',
        "Lightning's bf16-true breaks the states",
        'tests/ops/test_defaults.py::test_defaults_change_nothing', 'numba diagonal',
    ),
    Mutation(
        'fork-guard', 'fla_cpu/numba/threads.py', ' or pid != os.getpid()', '',
        'a forked child waits for threads that it does not have',
        'tests/ops/numba/test_threads.py::test_a_forked_child_has_threads_of_its_own',
    ),
    Mutation(
        'dq-unscaled', 'ops/numba/__init__.py', 'dq = scaled(dq, args.scale)', 'pass', 'dq lacks the scale', FLAGS,
        'numba diagonal chunk scale2.0',
    ),
    Mutation(
        'state-gradient-layout', 'ops/numba/__init__.py', 'dh0 = dh0.transpose(-1, -2).contiguous()', 'pass',
        "the initial state's gradient has the other layout", FLAGS, 'numba diagonal chunk initial_state-state_v_first',
    ),
    Mutation(
        'final-gradient-layout', 'ops/numba/__init__.py',
        'flat(k_first(dht, state_v_first)), flat(scaled', 'flat(dht), flat(scaled',
        "the final state's gradient is read in the other layout", FLAGS, 'numba diagonal chunk initial_state-state_v_first',
    ),
    Mutation(
        'given-state-unwritten', 'ops/numba/__init__.py', 'given.copy_(final_state)', 'final_state',
        'decoding leaves a state of the other layout as it was', 'tests/ops/test_state_update.py::test_in_place',
        'numba diagonal state_v_first',
    ),
    Mutation(
        'states-unsaved', 'ops/numba/__init__.py', 'C = checkpoint_interval(K) if save_states else T', 'C = T',
        'forward saves one state a sequence, backward expects one an interval', SHAPES, 'numba diagonal chunk T33',
    ),
    Mutation(
        'skipped-residual', 'ops/numba/forward.py',
        'for j in range(K):\n        diagonal_key(S, p_old + j * W, p_new + j * W, k, p_k + j, b_v, b_eps)',
        'for j in range(K):\n        diagonal_key(S, p_old + j * W, p_new + j * W, k, p_k + j, b_v, b_v)',
        'backward computes other states than forward had', FLAGS, 'numba diagonal chunk V12]',
    ),
    Mutation(
        'rounding', 'fla_cpu/numba/memory.py', 'builder.add(odd, constant(ints, 0x7fff))', 'constant(ints, 0x8000)',
        'bfloat16 is rounded up from halfway', 'tests/ops/numba/test_bfloat16.py::test_rounding_is_that_of_torch',
    ),
    Mutation(
        'first-dtype-decides', 'ops/numba/__init__.py',
        'torch.bfloat16 if all(x is None or', 'torch.bfloat16 if any(x is None or',
        'step sizes in float32 lose their digits beside values in bfloat16',
        'tests/ops/numba/test_bfloat16.py::test_the_way_changes_nothing', 'float32 False diagonal',
    ),
    Mutation(
        'norm-without-its-tail', 'ops/numba/forward.py', 'for j in range(0, K, LANES):',
        'for j in range(0, K - LANES + 1, LANES):',
        'keys lose the entries behind the last whole vector', SHAPES, 'numba diagonal chunk K3',
    ),
    Mutation(
        'overflow-as-a-step-of-zero', 'ops/numba/forward.py', 'return total + (FOUR * total - FOUR * total)', 'return total',
        'a key too long for float32 leaves no trace, in finite results', 'tests/ops/test_longhorn.py::test_too_large_keys',
        'numba chunk diagonal',
    ),
    Mutation(
        'slot-of-the-row', 'ops/numba/forward.py', 'return bos // C + i_n if is_varlen', 'return bos // C if is_varlen',
        'packed sequences write into the same slots', PACKED, 'numba diagonal chunk V9',
    ),
    Mutation(
        'saved-at-the-wrong-tokens', 'ops/numba/forward.py', 'and (t - bos) % C == 0', 'and t % C == 0',
        "states are saved where the row's intervals start, not the sequence's", PACKED, 'numba diagonal chunk V9',
    ),
    Mutation(
        'norm-gradient-halved', 'ops/numba/backward.py', '* (TWO * norm)', '* norm',
        "dk has half of the step size's part", FLAGS, 'numba diagonal chunk V12]',
    ),
    Mutation(
        'keys-of-the-first-rows', 'ops/numba/backward.py', 'sum_rows(rows, p_rows + j * LANES)', 'sum_rows(rows, p_rows)',
        'dk of all keys beyond the first group of lanes is that of the first', SHAPES, 'numba diagonal chunk K17',
    ),
    Mutation(
        'slope-of-a-plain-step', 'ops/numba/forward.py', 'return b_eps, (b_e * b_eps) * b_eps', 'return b_eps, b_eps * b_eps',
        "the sigmoid's slope lacks its exponential", FLAGS, 'numba diagonal chunk V12-sigmoid',
    ),
    Mutation(
        'step-gradient-without-values', 'ops/numba/backward.py', '(b_km + b_v * b_du)', '(b_km + b_km)',
        "the diagonal update's dbeta is made from one of its two sums", FLAGS, 'numba diagonal chunk V12]',
    ),
    Mutation(
        'key-of-another-head', 'ops/numba/backward.py', '(p_k - H * K, load(s_dy, i - W))', '(p_k - K, load(s_dy, i - W))',
        'the sweep takes the key of the head beside it for that of the token before', FLAGS, 'numba exact chunk V12]',
    ),
    Mutation(
        'gate-slope', 'ops/numba/backward.py', 'b_gate * (ONE + b_z * (ONE - b_gate))', 'b_gate * (ONE + b_z * b_gate)',
        'dz has a wrong slope of silu', FLAGS, 'numba diagonal chunk D-z',
    ),
    Mutation(
        'absent-final-row', 'ops/numba/places.py', 'np.where(last < 0, -1, last * stride)',
        'np.where(last < 0, 0, last * stride)',
        'a state that has no row goes to the first one', POOL, 'numba diagonal T1 elsewhere',
    ),
    Mutation(
        'absent-sequences-run', 'ops/numba/places.py', 'return places[used]', 'return places',
        'a sequence without a row has an output', POOL, 'numba diagonal T1 one',
    ),
]
