"""Mutations of the layer and of the modules that it is built from."""

from tests.mutate.mutation import TORCH, Mutation

CACHE = 'tests/layers/test_cache.py::'
LOOK_AHEAD = 'tests/models/test_cache.py::test_a_look_ahead_changes_nothing'
LAYER = 'tests/layers/test_longhorn.py::'
DECAY = 'tests/layers/test_weight_decay.py::test_layer'
BOUNDARIES = 'tests/models/test_boundaries.py::'
COMPILED = 'tests/torch_compile/'
RECOMPUTE = 'tests/layers/test_recompute.py::'
WAYS = 'tests/layers/test_ways_of_use.py::'
GATE = 'tests/models/test_gate.py::'
TENSOR_PARALLEL = 'packages/extras/fla_longhorn_extras/tensor_parallel.py'
PARALLEL = 'packages/extras/tests/distributed/test_parallel.py::'
BARE = 'tests/layers/test_bare.py::'

MUTATIONS = [
    Mutation(
        'look-ahead-writes-the-state', 'layers/longhorn.py', 'T == 1 and use_cache and not differentiated',
        'T == 1 and not differentiated', 'a call with use_cache=False overwrites the state of the cache',
        LOOK_AHEAD, '[paper-1-inference_mode-False]', env=TORCH,
    ),
    Mutation(
        'decay-mark-of-a-copy', 'layers/weight_decay.py', '__setstate__(state)\n        self.mark_no_weight_decay()',
        '__setstate__(state)', "a copied layer's D decays", DECAY, 'deepcopy',
    ),
    Mutation(
        'queries-as-keys', 'layers/longhorn.py',
        'self.by_heads(q[0] if q else k),\n            self.k_norm(self.by_heads(k)),',
        'self.by_heads(k),\n            self.k_norm(self.by_heads(q[0] if q else k)),',
        "the authors' checkpoints have keys and queries swapped", LAYER + 'test_equation', '13', env=TORCH,
    ),
    Mutation(
        'traced-padding-order', 'modules/rows.py', 'lengths[:, None] + self.padding.cumsum(1) - 1',
        'self.padding.cumsum(1) - 1', 'a compiled layer puts padding over tokens', COMPILED + 'test_modules.py::test_padding',
    ),
    Mutation(
        'restarts-in-a-batch', 'modules/boundaries.py', '((steps <= 0) & both)', '(steps <= 0)',
        'positions of padding count as packed sequences',
        BOUNDARIES + 'test_positions_of_one_sequence_change_nothing', env=TORCH,
    ),
    Mutation(
        'autocast-forgotten', 'modules/recompute.py', 'with torch.no_grad(), self.autocast():',
        'with torch.no_grad():',
        'backward computes again in another dtype', RECOMPUTE + 'test_gradients_of_a_layer', 'exact-float16',
    ),
    Mutation(
        'weights-of-backward', 'layers/longhorn.py',
        'F.linear, b, self.beta_proj.weight, self.beta_proj.bias', 'self.beta_proj.forward, b',
        'backward computes again with weights that a module has been given since',
        WAYS + 'test_gradients', 'functional_call-paper',
    ),
    Mutation(
        'changed-value-computed-again', 'modules/recompute.py', ' or x._version != value.version', '',
        'backward takes a value for what it was before a change', RECOMPUTE + 'test_a_value_changed_in_place_is_kept',
    ),
    Mutation(
        'weights-of-any-class', 'modules/bare.py', 'type(x) in KNOWN and x.device', 'x.device',
        'quantised weights are multiplied as they are stored', BARE + 'test_what_is_put_in_or_around_a_module_is_seen',
    ),
    Mutation(
        'part-of-the-gradient', TENSOR_PARALLEL, 'if x.requires_grad:', 'if False:',
        "the gradients of queries and keys are those of a rank's channels", PARALLEL + 'test_equals_one_process', 'options',
    ),
    Mutation(
        'columns-not-exchanged', TENSOR_PARALLEL,
        'all_to_all_single_autograd(blocks.contiguous(), received, sent, self.mesh.get_group())',
        'blocks.contiguous()', "values and gates are the columns that a rank's part of in_proj has",
        PARALLEL + 'test_equals_one_process', 'options',
    ),
    Mutation(
        'heads-of-the-first-rank', TENSOR_PARALLEL, 'x.narrow(dim, self.heads.start,', 'x.narrow(dim, 0,',
        'each rank takes the queries and keys of the first heads', PARALLEL + 'test_equals_one_process', 'options',
    ),
    Mutation(
        'rates-of-the-first-heads', TENSOR_PARALLEL, "{'A_log': partial(part.of_heads, dim=0)}",
        "{'A_log': lambda x: x[:count]}",
        "each rank's channels decay at the rates of the first heads",
        PARALLEL + 'test_equals_one_process', 'options',
    ),
    Mutation(
        'rates-without-A_log', 'layers/gate.py', 'return -A_log.to(dtype).exp()', 'return -A_log.to(dtype)',
        "a gate's rates are not those of fla's layers", 'tests/layers/test_longhorn.py::test_equation', 'gate',
    ),
    Mutation(
        'loaded-gate-overwritten', 'layers/gate.py', "if getattr(self.dt_bias, '_is_hf_initialized', False):", 'if False:',
        'a checkpoint without A_log loses its dt_bias', GATE + 'test_missing_in_a_checkpoint', 'A_log longhorn',
    ),
    Mutation(
        'gate-of-plain-tensors', 'layers/gate.py',
        'if isinstance(self.dt_bias, DTensor):', 'if False:',
        'a sharded model with a gate cannot be initialised', GATE + 'test_sharded_on_meta',
    ),
    Mutation(
        'parts-unseen-in-decoding', 'packages/cpu/fla_longhorn_cpu/token.py',
        'if not runs(linear, nn.Linear) or linear.bias is not None:', 'if False:',
        'decoding passes by adapters, hooks and biases', 'packages/cpu/tests/longhorn/test_parts.py',
    ),
    Mutation(
        'tokens-for-rows', 'layers/longhorn.py', 'else rows.in_place', 'else rows',
        'hooks and adapters see one row of all tokens of a padded batch', 'tests/models/test_parts_see_rows.py::test_hooks',
        'diagonal left', env=TORCH,
    ),
]
