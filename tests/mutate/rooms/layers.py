"""Mutations of the layer and of the modules that it is built from."""

from tests.mutate.mutation import TORCH, Mutation

CACHE = 'tests/layers/test_cache.py::'
LOOK_AHEAD = 'tests/models/test_cache.py::test_a_look_ahead_changes_nothing'
LAYER = 'tests/layers/test_longhorn.py::'
DECAY = 'tests/layers/test_weight_decay.py::test_layer'
BOUNDARIES = 'tests/models/test_boundaries.py::'
COMPILED = 'tests/torch_compile/'
RECOMPUTE = 'tests/layers/test_recompute.py::'
GATE = 'tests/models/test_gate.py::'
PARALLEL = 'tests/distributed/test_parallel.py::'
BARE = 'tests/layers/test_bare.py::'

MUTATIONS = [
    Mutation(
        'look-ahead-writes-the-state', 'layers/longhorn.py', 'call.T == 1 and call.use_cache and can_update_in_place(',
        'call.T == 1 and can_update_in_place(', 'a call with use_cache=False overwrites the state of the cache',
        LOOK_AHEAD, '[paper-1-no_grad-False]', env=TORCH,
    ),
    Mutation(
        'decay-mark-of-a-copy', 'layers/weight_decay.py', '__setstate__(state)\n        self.mark_no_weight_decay()',
        '__setstate__(state)', "a copied layer's D decays", DECAY, 'deepcopy',
    ),
    Mutation(
        'queries-as-keys', 'layers/longhorn.py', 'b, k, q = self.split', 'b, q, k = self.split',
        "the authors' checkpoints have keys and queries swapped", LAYER + 'test_equation', '13', env=TORCH,
    ),
    Mutation(
        'traced-padding-order', 'modules/rows.py', 'self.lengths[:, None] + (~kept).cumsum(1) - 1',
        '(~kept).cumsum(1) - 1', 'a compiled layer puts padding over tokens', COMPILED + 'test_modules.py::test_padding',
    ),
    Mutation(
        'restarts-in-a-batch', 'modules/varlen.py', '(position_ids[kept].diff() <= 0) & (rows.diff() == 0)',
        'position_ids[kept].diff() <= 0', 'the second row of a batch counts as a packed sequence',
        BOUNDARIES + 'test_positions_of_one_sequence_change_nothing', env=TORCH,
    ),
    Mutation(
        'version-unchecked', 'modules/recompute.py', 'if self.x._version != self.version:', 'if False:',
        'backward computes with an input that was overwritten', RECOMPUTE + 'test_a_changed_input_is_refused',
    ),
    Mutation(
        'autocast-forgotten', 'modules/recompute.py', 'with torch.no_grad(), self.autocast():', 'with torch.no_grad():',
        'backward computes again in another dtype', RECOMPUTE + 'test_gradients_of_a_layer', 'exact-float16',
    ),
    Mutation(
        'weights-of-backward', 'modules/recompute.py', 'function, as_now(module), inputs', 'function, module, inputs',
        'backward computes again with weights that a module has been given since',
        RECOMPUTE + 'test_weights_of_a_functional_call',
    ),
    Mutation(
        'weights-unchecked', 'modules/recompute.py', '                weight.get()', '                pass',
        'backward computes again with weights that have changed', RECOMPUTE + 'test_a_weight_changed_in_place_is_refused',
    ),
    Mutation(
        'changed-value-computed-again', 'modules/recompute.py', ' or value.version != x._version', '',
        'backward takes a value for what it was before a change', RECOMPUTE + 'test_a_value_changed_in_place_is_kept',
    ),
    Mutation(
        'memory-given-away', 'modules/recompute.py', 'self.values[storage] =', 'self.values[x.data_ptr()] =',
        "a tensor in a value's former memory is taken for it",
        RECOMPUTE + 'test_the_memory_of_a_value_is_not_given_to_another',
    ),
    Mutation(
        'weights-of-any-class', 'modules/bare.py', 'type(weight) in ORDINARY', 'True',
        'quantised weights are multiplied as they are stored', BARE + 'test_what_is_put_in_or_around_a_module_is_seen',
    ),
    Mutation(
        'part-of-the-gradient', 'modules/tensor_parallel.py', 'if x.requires_grad:', 'if False:',
        "the gradients of queries and keys are those of a rank's channels", PARALLEL + 'test_equals_one_process', 'options',
    ),
    Mutation(
        'columns-not-exchanged', 'modules/tensor_parallel.py',
        'all_to_all_single_autograd(blocks.contiguous(), received, sent, self.mesh.get_group()).unbind(0)',
        'blocks.contiguous().unbind(0)', "values and gates are the columns that a rank's part of in_proj has",
        PARALLEL + 'test_equals_one_process', 'options',
    ),
    Mutation(
        'heads-of-the-first-rank', 'modules/tensor_parallel.py', 'first = rank * heads // n', 'first = 0',
        'each rank takes the queries and keys of the first heads', PARALLEL + 'test_equals_one_process', 'options',
    ),
    Mutation(
        'rates-of-the-first-heads', 'layers/gate.py', 'self.A_log if part is None else part.of_heads(self.A_log, 0)',
        'self.A_log if part is None else self.A_log[:part.num_heads]',
        "each rank's channels decay at the rates of the first heads",
        PARALLEL + 'test_equals_one_process', 'options',
    ),
    Mutation(
        'loaded-gate-overwritten', 'layers/gate.py', "if getattr(self.dt_bias, '_is_hf_initialized', False):", 'if False:',
        'a checkpoint without A_log loses its dt_bias', GATE + 'test_missing_in_a_checkpoint', 'A_log longhorn',
    ),
    Mutation(
        'gate-of-plain-tensors', 'layers/gate.py',
        'distributed_as(self.dt_bias, rates + torch.log(-torch.expm1(-rates)))', 'rates + torch.log(-torch.expm1(-rates))',
        'a sharded model with a gate cannot be initialised', GATE + 'test_sharded_on_meta',
    ),
]
