"""Mutations of the public operators, their checks and the operator behind them."""

from tests.mutate.mutation import TORCH, Mutation

PACKED = 'tests/ops/test_longhorn.py::test_packed'
TRANSFORMS = 'tests/ops/test_transforms.py::test_equals_the_naive_op'

MUTATIONS = [
    Mutation(
        'absent-output-gradient', 'ops/autograd.py', 'do = args.v.new_zeros(ctx.shape)', 'do = args.v.new_ones(ctx.shape)',
        'a loss of the final state alone gets a gradient from the outputs',
        'tests/ops/test_branches.py::test_gradients_of_one_output', 'torch diagonal state',
    ),
    Mutation(
        'fake-slots', 'ops/autograd.py',
        'checkpoint_interval(K), args.cu_seqlens is not None)\n    # meta',
        'checkpoint_interval(K), False)\n    # meta',
        'a compiled program takes packed sequences to save as many states as one sequence',
        'tests/torch_compile/test_ops.py::test_opcheck', 'lengths diagonal', env=TORCH,
    ),
    Mutation(
        'forward-mode-dropped', 'ops/plain.py',
        'return not tensors or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)',
        'return not tensors',
        'forward-mode differentiation loses its tangents', TRANSFORMS, 'diagonal forward_ad chunk', env=TORCH,
    ),
    Mutation(
        'state-of-rows', 'ops/arguments.py',
        'return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1',
        'return self.q.shape[0]', 'packed sequences share one state', PACKED, 'torch diagonal chunk V9',
    ),
    Mutation(
        'decays-of-differences', 'ops/naive_chunk.py', 'torch.where(later, g[:, :, None], 0).cumsum(1)',
        '(g.cumsum(1)[:, :, None] - g.cumsum(1)[:, None])', 'a gate that resets the state gives NaN',
        'tests/ops/test_naive_chunk.py::test_a_decay_to_zero', 'exact', env=TORCH,
    ),
    Mutation(
        'maps-in-the-wrong-order', 'ops/naive_chunk.py', 'a[:, n:] * b[:, :-n] + b[:, n:]', 'a[:, :-n] * b[:, n:] + b[:, :-n]',
        'a later token is forgotten before an earlier one', 'tests/ops/test_naive_chunk.py::test_outputs_and_gradients',
        'diagonal', env=TORCH,
    ),
    Mutation(
        'ranks-undecayed', 'ops/context_parallel/gather.py', 'state = decay * state + local', 'state = state + local',
        'what earlier ranks wrote is not forgotten', 'tests/ops/context_parallel/test_op.py::test_equals_one_rank', 'cpu',
        env={'NUMBA_DISABLE_JIT': '1'},
    ),
    Mutation(
        'loops-that-stay', 'patches/parts.py', "changes.set_attribute(backends, 'loops', loops)", 'backends.loops = loops',
        'operators stay in Numba where packages are reverted',
        'packages/cpu/tests/longhorn/test_door.py::test_packages_are_reverted_and_applied_again',
    ),
    Mutation(
        'update-uncounted', 'ops/fused_recurrent.py', '        if not state.is_inference():', '        if False:',
        'backward goes on with states that decoding has overwritten',
        'tests/ops/test_state_update.py::test_an_update_is_counted', env=TORCH,
    ),
    Mutation(
        'inputs-among-the-states', 'ops/fused_recurrent.py', 'apart_from(state, args)', 'args',
        'inputs that are views of the states are read after they are overwritten',
        'tests/ops/test_state_update.py::test_inputs_in_the_memory_of_the_state', 'numba',
    ),
    Mutation(
        'states-not-read', 'ops/update.py', 'args = args._replace(initial_state=pool.states)', 'pass',
        'an update that is no plain step starts from zero', 'tests/ops/test_state_update.py::test_in_place', 'numba',
    ),
]
