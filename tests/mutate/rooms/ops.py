"""Mutations of the public operators, their checks and the operator behind them."""

from tests.mutate.mutation import TORCH, Mutation

FLAGS = 'tests/ops/test_longhorn.py::test_flags'
PACKED = 'tests/ops/test_longhorn.py::test_packed'
ERRORS = 'tests/ops/test_errors.py::test_bad_call'
POOL = 'tests/ops/test_pool.py::test_pool_equals_gather_update_scatter'
TRANSFORMS = 'tests/ops/test_transforms.py::test_equals_the_naive_op'

MUTATIONS = [
    Mutation(
        'states-saved-for-q-and-k-alone', 'ops/operator.py',
        'x.requires_grad for x in args.differentiable.values())', 'x.requires_grad for x in (args.q, args.k))',
        'backward has no states to start from where q and k ask for no gradient',
        'tests/ops/test_longhorn.py::test_gradients_of_some_inputs', 'torch diagonal chunk',
    ),
    Mutation(
        'final-state-unasked', 'ops/operator.py',
        'return o, final_state if args.output_final_state else None\n', 'return o, final_state\n',
        'an empty tensor is returned in place of None',
        'tests/ops/test_longhorn.py::test_no_final_state_unless_asked', 'torch',
    ),
    Mutation(
        'scale-forgotten', 'ops/operator.py',
        '    if type(args.scale) is not float:\n        args = args._replace(scale=float(args.scale))',
        '    args = args._replace(scale=1.0)',
        'the queries are not scaled', FLAGS, 'torch diagonal chunk scale0.25',
    ),
    Mutation(
        'absent-output-gradient', 'ops/operator.py', 'do = args.v.new_zeros(ctx.shape)', 'do = args.v.new_ones(ctx.shape)',
        'a loss of the final state alone gets a gradient from the outputs',
        'tests/ops/test_longhorn.py::test_gradients_of_one_output', 'torch diagonal state',
    ),
    Mutation(
        'second-derivative-unrefused', 'ops/operator.py', 'longhorn_bwd.register_autograd(_second_backward)', '',
        'a second derivative is not refused in a sentence that says what to call',
        'tests/ops/test_transforms.py::test_a_second_backward_is_refused', env=TORCH,
    ),
    Mutation(
        'compiled-boundaries-unchecked', 'ops/operator.py', 'args = with_boundaries_checked(Arguments(*fields))',
        'args = Arguments(*fields)', 'a compiled program reads outside its tensors where boundaries are wrong',
        'tests/ops/test_errors.py::test_compiled_programs_check_boundaries_when_they_run', env=TORCH,
    ),
    Mutation(
        'update-out-of-place', 'ops/operator.py', 'args, final_state=pool.states, **', 'args, **',
        'decoding leaves the state as it was', 'tests/ops/test_state_update.py::test_in_place', 'torch diagonal',
    ),
    Mutation(
        'fake-output-strides', 'ops/operator.py',
        'o = torch.empty_like(args.v, memory_format=torch.contiguous_format)', 'o = torch.empty_like(args.v)',
        'a compiled program takes the output to have the strides of v',
        'tests/torch_compile/test_ops.py::test_strided_values', 'diagonal', env=TORCH,
    ),
    Mutation(
        'fake-slots', 'ops/operator.py',
        'checkpoint_interval(K), args.cu_seqlens is not None)\n    return o, final_state, args',
        'checkpoint_interval(K), False)\n    return o, final_state, args',
        'a compiled program takes packed sequences to save as many states as one sequence',
        'tests/torch_compile/test_ops.py::test_opcheck', 'lengths diagonal', env=TORCH,
    ),
    Mutation(
        'forward-mode-dropped', 'ops/apply.py', 'return under_transform() or has_tangent(args)', 'return under_transform()',
        'forward-mode differentiation loses its tangents', TRANSFORMS, 'diagonal forward_ad chunk', env=TORCH,
    ),
    Mutation(
        'transforms-dropped', 'ops/apply.py', 'return under_transform() or has_tangent(args)', 'return has_tangent(args)',
        'torch.func meets operators without batching rules', TRANSFORMS, 'diagonal hessian chunk', env=TORCH,
    ),
    Mutation(
        'D-and-z-swapped', 'ops/chunk.py', 'output_final_state, exact, D, z,\n            use_beta',
        'output_final_state, exact, '
        'z, D,\n            use_beta', 'the skip weight and the gate change places', FLAGS, 'torch diagonal chunk sigmoid-D',
    ),
    Mutation(
        'parallel-forgotten', 'ops/fused_recurrent.py', 'parallel=False', 'parallel=True',
        'the recurrent operator cuts time into segments', 'tests/ops/test_longhorn.py::test_only_chunk_cuts_time', 'torch',
    ),
    Mutation(
        'boundaries-end-early', 'ops/inputs.py', 'if bounds[-1] != T:', 'if bounds[-1] > T:',
        'tokens behind the last boundary are left out', ERRORS, 'end early',
    ),
    Mutation(
        'boundaries-start-late', 'ops/inputs.py', 'if bounds[0] != 0:', 'if bounds[0] < 0:',
        'tokens before the first boundary are left out', ERRORS, 'start late',
    ),
    Mutation(
        'empty-sequences-refused', 'ops/inputs.py', 'if b < a), None)', 'if b <= a), None)',
        'packed sequences must not be empty', PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'host-copy-believed', 'ops/inputs.py', 'if not torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu):', 'if False:',
        'a host copy with other values passes', 'tests/ops/test_errors.py::test_host_copy_that_contradicts', 'other values',
    ),
    Mutation(
        'devices-unchecked', 'ops/inputs.py', 'if x.device != q.device:', "if name == 'k' and x.device != q.device:",
        'tensors on another device reach a kernel', ERRORS, 'another device',
    ),
    Mutation(
        'largest-key-refused', 'ops/inputs.py', 'if K > MAX_STATE_SIZE:', 'if K >= MAX_STATE_SIZE:',
        'the largest documented state is refused', 'tests/ops/test_longhorn.py::test_shapes', 'torch diagonal chunk K256',
    ),
    Mutation(
        'float64-taken', 'ops/inputs.py', 'allow_float64 and x.dtype == torch.float64', 'x.dtype == torch.float64',
        'float64 is computed in float32 without a word', 'tests/ops/test_errors.py::test_float64_is_for_the_naive_op',
    ),
    Mutation(
        'state-of-rows', 'ops/arguments.py',
        'return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1',
        'return self.q.shape[0]', 'packed sequences share one state', PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'backend-by-name-ignored', 'ops/backend.py',
        "name = asked or default_backend(device_type, interpret)", 'name = default_backend(device_type, interpret)',
        'a backend that is asked for by name does not run', 'tests/ops/test_errors.py::TestBackend::test_unknown',
    ),
    Mutation(
        'numba-never-chosen', 'ops/backend.py', "return 'torch' if importlib.util.find_spec('numba') is None else 'numba'",
        "return 'torch'", 'the CPU runs the slow backend', 'tests/ops/test_errors.py::TestBackend::test_default_on_the_cpu',
    ),
    Mutation(
        'triton-on-the-cpu', 'ops/backend.py', "if name == 'triton' and device_type == 'cpu' and interpret != '1':",
        "if name == 'triton' and device_type == 'cpu' and interpret == '1':",
        'Triton is started without a GPU', 'tests/ops/test_errors.py::TestBackend::test_triton_needs_a_gpu',
    ),
    Mutation(
        'slot-missing', 'ops/checkpoints.py', 'return T // interval + N if', 'return T // interval + N - 1 if',
        'the last packed sequence has no slot for its states', PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'tail-has-no-slot', 'ops/checkpoints.py', 'B * triton.cdiv(T, interval)', 'B * max(T // interval, 1)',
        'the tokens behind the last whole interval have no slot', 'tests/ops/test_longhorn.py::test_shapes',
        'torch diagonal chunk T33',
    ),
    Mutation(
        'states-saved-too-often', 'ops/checkpoints.py', '1 << (8 * K - 1).bit_length()', '1 << (K - 1).bit_length()',
        'saved states take more memory than the inputs', 'tests/ops/test_longhorn.py::test_saved_for_backward',
        'torch diagonal',
    ),
    Mutation(
        'naive-exact-sign', 'ops/naive.py', '(v_t - (k_t * S).sum(-2', '(v_t + (k_t * S).sum(-2',
        'the oracle adds what the memory recalls', 'tests/ops/test_naive.py::test_exact_is_the_minimiser',
    ),
    Mutation(
        'naive-decay', 'ops/naive.py', '(1 - k_t.square() * eps_t)', '(1 - k_t * eps_t)',
        'the oracle forgets by the key, not by its square', 'tests/ops/test_naive.py::test_is_algorithm_1',
    ),
    Mutation(
        'naive-norm', 'ops/naive.py', 'k.square().sum(-1, keepdim=True)', 'k.square().mean(-1, keepdim=True)',
        "the oracle's step size has the mean in place of the norm", 'tests/ops/test_naive.py::test_is_algorithm_1',
    ),
    Mutation(
        'naive-layout', 'ops/naive.py', 'final_state = final_state.transpose(-1, -2)', 'pass',
        'the oracle returns the state in the other layout', FLAGS, 'torch diagonal chunk state_v_first',
    ),
    Mutation(
        'naive-gate', 'ops/naive.py', 'torch.nn.functional.silu(z.to(dtype))', 'torch.sigmoid(z.to(dtype))',
        "the oracle's gate lacks its factor z", FLAGS, 'torch diagonal chunk sigmoid-D',
    ),
    Mutation(
        'update-with-a-gradient', 'ops/state_update.py', 'if needs_gradient(everything) or has_tangent', 'if has_tangent',
        'a state that autograd needs is overwritten', 'tests/ops/test_state_update.py::test_bad_state', env=TORCH,
    ),
    Mutation(
        'update-of-strided-states', 'ops/inputs.py', 'if not row.is_contiguous() or', 'if',
        'rows are read in an order that is not theirs', 'tests/ops/test_state_update.py::test_bad_state', env=TORCH,
    ),
    Mutation(
        'plain-update-uncounted', 'ops/operator.py', '    if not states.is_inference():', '    if False:',
        'backward goes on with states that decoding has overwritten',
        'tests/ops/test_state_update.py::test_a_plain_update_is_counted', env=TORCH,
    ),
    Mutation(
        'inputs-of-a-step-among-the-states', 'ops/state_update.py', 'x.data_ptr() < end and span(x)[1] > start', 'False',
        'inputs of decoding that are views of the states are read after they are overwritten',
        'tests/ops/test_state_update.py::test_inputs_in_the_memory_of_the_state', 'numba',
    ),
    Mutation(
        'step-of-any-shape', 'ops/state_update.py', 'x.shape != shape or ', '', 'decoding reads memory that is not its own',
        'tests/ops/test_state_update.py::test_errors_of_a_plain_step', env=TORCH,
    ),
    Mutation(
        'inputs-among-the-states', 'ops/operator.py', '    args = apart_from(pool.states, args)\n', '',
        'inputs that are views of the states are read after they are overwritten',
        'tests/ops/test_state_update.py::test_inputs_in_the_memory_of_the_state', 'numba',
    ),
    Mutation(
        'D-of-any-dtype-in-a-step', 'ops/numba/__init__.py', ' or (args.D is not None and args.D.dtype not in BITS)', '',
        'decoding fails where D alone is float16', 'tests/ops/test_state_update.py::test_a_token_with_D_in_another_dtype',
        'numba float16-torch.float32',
    ),
    Mutation(
        'rows-that-overlap', 'ops/inputs.py', 'state.stride(0) < size', 'state.stride(0) < 0',
        'rows of a pool may share elements', 'tests/ops/test_pool_errors.py::test_bad_call', 'overlapping', env=TORCH,
    ),
    Mutation(
        'written-and-read', 'ops/inputs.py', 'writers.get(row, n) != n', 'writers.get(row, n) < 0',
        'a sequence starts from a row that another one is writing', 'tests/ops/test_pool_errors.py::test_bad_call',
        'written', env=TORCH,
    ),
    Mutation(
        'zero-is-no-row', 'ops/pool.py', '(indices < 0) |', '(indices <= 0) |', 'row 0 of the pool is skipped', POOL,
        'torch diagonal T1 all', env=TORCH,
    ),
    Mutation(
        'null-block-is-a-row', 'ops/pool.py', ' | (indices == self.pad_slot_id)', '', 'the null block is updated', POOL,
        'torch diagonal T1 null', env=TORCH,
    ),
    Mutation(
        'absent-outputs', 'ops/torch/__init__.py', 'pool.without_absent(o, args.cu_seqlens)', 'o',
        'a sequence without a row has an output', POOL, 'torch diagonal T1 one', env=TORCH,
    ),
    Mutation(
        'final-rows-ignored', 'ops/pool.py', 'last = first if self.final_state_indices is None else',
        'last = first if True else', 'the rows of a shared prefix are overwritten', POOL, 'torch diagonal T1 elsewhere',
        env=TORCH,
    ),
    Mutation(
        'stale-rows', 'ops/pool.py', 'first = torch.where(self.has_initial_state, first, -1)', 'pass',
        'a new request starts from what an old one left', POOL, 'torch diagonal T1 zero', env=TORCH,
    ),
]
