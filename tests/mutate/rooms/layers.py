"""Mutations of the layer and of the modules that it is built from."""

from tests.mutate.mutation import TORCH, Mutation

CACHE = 'tests/layers/test_cache.py::'
LAYER = 'tests/layers/test_longhorn.py::'
DECAY = 'tests/layers/test_weight_decay.py::test_layer'
BOUNDARIES = 'tests/models/test_boundaries.py::'
COMPILED = 'tests/torch_compile/'
RECOMPUTE = 'tests/layers/test_recompute.py::'
PARALLEL = 'tests/distributed/test_parallel.py::'
SPLIT = 'tests/layers/test_split_linear.py::'

MUTATIONS = [
    Mutation(
        'look-ahead-writes-the-state', 'layers/longhorn.py', 'q_len == 1 and use_cache and can_update_in_place(',
        'q_len == 1 and can_update_in_place(', 'a call with use_cache=False overwrites the state of the cache',
        CACHE + 'test_a_look_ahead_changes_nothing', '[False-1-no_grad-]', env=TORCH,
    ),
    Mutation(
        'look-ahead-writes-the-convolution', 'modules/convolution.py',
        'if cache is not None and (not output_final_state or cache',
        'if cache is not None and (cache', "a call with use_cache=False overwrites the convolution's state",
        CACHE + 'test_a_look_ahead_changes_nothing', '[False-1-no_grad-]', env=TORCH,
    ),
    Mutation(
        'graph-overwritten', 'modules/cache.py', ' or torch.is_grad_enabled() or state.requires_grad or',
        ' or torch.is_grad_enabled() or', 'decoding overwrites a state that autograd saved',
        CACHE + 'test_decoding_leaves_states_with_a_graph_alone', env=TORCH,
    ),
    Mutation(
        'convolution-graph-overwritten', 'modules/convolution.py', '(not output_final_state or cache.requires_grad)',
        'not output_final_state', "decoding overwrites a convolution's state that autograd saved",
        CACHE + 'test_decoding_leaves_states_with_a_graph_alone', env=TORCH,
    ),
    Mutation(
        'update-with-gradients', 'modules/cache.py', 'if state is None or torch.is_grad_enabled() or', 'if state is None or',
        'a training step from a cache is refused', CACHE + 'test_modes_of_pytorch', '[1-no grad-grad]', env=TORCH,
    ),
    Mutation(
        'inference-tensors', 'modules/cache.py',
        "outside_inference_mode(state['recurrent_state']), outside_inference_mode(state['conv_state'])",
        "state['recurrent_state'], state['conv_state']", 'a cache made in inference mode serves no other mode',
        CACHE + 'test_modes_of_pytorch', 'inference-', env=TORCH,
    ),
    Mutation(
        'state-of-another-batch', 'modules/cache.py', 'or x.shape != shape:', 'or x.shape[1:] != shape[1:]:',
        "another batch's cache is read", CACHE + 'test_states_of_another_model', env=TORCH,
    ),
    Mutation(
        'tokens-miscounted', 'layers/longhorn.py', 'conv_state=conv_state, offset=q_len,', 'conv_state=conv_state, offset=1,',
        'the cache counts one token a call', CACHE + 'test_a_look_ahead_changes_nothing', '[False-2-no_grad-]', env=TORCH,
    ),
    Mutation(
        'decay-mark-of-a-new-parameter', 'layers/weight_decay.py',
        'register_parameter(name, param)\n        self.mark_no_weight_decay()',
        'register_parameter(name, param)', "a fresh layer's D decays", DECAY, 'fresh',
    ),
    Mutation(
        'decay-mark-after-to-empty', 'layers/weight_decay.py', '_apply(*args, **kwargs)\n        self.mark_no_weight_decay()',
        '_apply(*args, **kwargs)', 'D decays once the layer has left the meta device', DECAY, 'to_empty',
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
        'gate-as-value', 'layers/longhorn.py', 'x, z = split_linear(', 'z, x = split_linear(',
        "the authors' checkpoints have gate and value swapped", LAYER + 'test_equation', '13', env=TORCH,
    ),
    Mutation(
        'keys-unnormalised', 'layers/longhorn.py', 'k=self.k_norm(self.by_heads(k))', 'k=self.by_heads(k)',
        "k_norm='l2' does nothing", LAYER + 'test_normalised_keys_have_no_scale', env=TORCH,
    ),
    Mutation(
        'value-projection-forgotten', 'layers/longhorn.py', 'v=self.by_heads(x if self.v_proj is None else self.v_proj(x))',
        'v=self.by_heads(x)', 'value_proj=True does nothing', LAYER + 'test_equation', 'value_proj', env=TORCH,
    ),
    Mutation(
        'state-forgotten', 'layers/longhorn.py', 'initial_state=recurrent_state, output_final_state', 'output_final_state',
        'every piece of a sequence starts from nothing', LAYER + 'test_in_pieces', '70', env=TORCH,
    ),
    Mutation(
        'beta-bias', 'layers/longhorn.py', '        nn.init.zeros_(self.beta_proj.bias)\n', '',
        'step sizes of a fresh layer do not start at one half', LAYER + 'test_fresh_step_sizes',
    ),
    Mutation(
        'traced-padding-writes', 'layers/longhorn.py', 'k = rows.silence(k)', 'pass',
        'padding behind the tokens changes the states of a compiled layer', COMPILED + 'test_layer.py::test_padding_in_pieces',
        env=TORCH,
    ),
    Mutation(
        'traced-padding-order', 'modules/rows.py', 'self.lengths[:, None] + (~kept).cumsum(1) - 1',
        '(~kept).cumsum(1) - 1', 'a compiled layer puts padding over tokens', COMPILED + 'test_modules.py::test_padding',
    ),
    Mutation(
        'traced-boundary', 'modules/convolution.py', 'inside = (position >= lag)', 'inside = (position > lag)',
        'a compiled convolution loses the first token of each packed sequence',
        COMPILED + 'test_modules.py::test_convolution', '[2--packed]',
    ),
    Mutation(
        'traced-step-of-padding', 'modules/convolution.py', 'torch.where(lengths[:, None, None] > 0, window, state)', 'window',
        "padding enters a compiled convolution's state", COMPILED + 'test_modules.py::test_a_step_of_padding',
    ),
    Mutation(
        'additive-mask', 'modules/varlen.py', 'wrong = mask[(mask != 0) & (mask != 1)]', 'wrong = mask[mask > 1]',
        'additive masks pass as masks of zeros and ones', 'tests/layers/test_attention_mask.py::test_refused', env=TORCH,
    ),
    Mutation(
        'mask-of-one-row', 'modules/varlen.py', 'if mask.shape[0] != B or', 'if mask.shape[0] not in (1, B) or',
        'a mask of one row passes for a batch', 'tests/layers/test_attention_mask.py::test_refused', 'one row', env=TORCH,
    ),
    Mutation(
        'restarts-in-a-batch', 'modules/varlen.py', '(position_ids[kept].diff() <= 0) & (rows.diff() == 0)',
        'position_ids[kept].diff() <= 0', 'the second row of a batch counts as a packed sequence',
        BOUNDARIES + 'test_positions_of_one_sequence_change_nothing', env=TORCH,
    ),
    Mutation(
        'restarts-one-early', 'modules/varlen.py', 'return columns[1:][starts]', 'return columns[:-1][starts]',
        'position_ids cut sequences a token too early', BOUNDARIES + 'test_layer', env=TORCH,
    ),
    Mutation(
        'changes-one-early', 'modules/varlen.py', 'changes.nonzero()[:, 1] + 1', 'changes.nonzero()[:, 1]',
        'seq_idx cuts sequences a token too early', BOUNDARIES + 'test_layer', env=TORCH,
    ),
    Mutation(
        'contradictions', 'modules/varlen.py', '        _check_agreement(found)\n', '        pass\n',
        'one of two contradictory boundaries wins', BOUNDARIES + 'test_refused', env=TORCH,
    ),
    Mutation(
        'keywords-swallowed', 'modules/varlen.py', 'if value is not None and name not in KEYWORDS and',
        'if value is None and',
        'a misspelt keyword is ignored', BOUNDARIES + 'test_unknown_keyword', env=TORCH,
    ),
    Mutation(
        'heads-that-do-not-divide', 'layers/options.py', 'if round(channels) % num_heads:', 'if round(channels) < num_heads:',
        'heads that do not divide the channels fail in a reshape', 'tests/layers/test_options.py::test_layer', 'num_heads',
    ),
    Mutation(
        'hooks-around-forgotten', 'modules/recompute.py', 'self.x = x if hooks is None else hooks[0](x)',
        'self.x, self.hooks = x, None', 'a checkpoint keeps what it should drop',
        RECOMPUTE + 'test_a_checkpoint_keeps_nothing_more',
    ),
    Mutation(
        'version-unchecked', 'modules/recompute.py', 'if self.x._version != self.version:', 'if False:',
        'backward computes with an input that was overwritten', RECOMPUTE + 'test_a_changed_input_is_refused',
    ),
    Mutation(
        'adapters-computed-again', 'modules/recompute.py', 'is_bare(module, x.device) and ', '',
        'dropout in an adapter draws other numbers in backward', RECOMPUTE + 'test_gradients_of_a_model', 'adapters',
    ),
    Mutation(
        'autocast-forgotten', 'modules/recompute.py', 'with torch.no_grad(), self.autocast():', 'with torch.no_grad():',
        'backward computes again in another dtype', RECOMPUTE + 'test_gradients_of_a_layer', 'exact-autocast',
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
        'memory-given-away', 'modules/recompute.py', 'self.storages.append(storage)', 'pass',
        "a tensor in a value's former memory is taken for it",
        RECOMPUTE + 'test_the_memory_of_a_value_is_not_given_to_another',
    ),
    Mutation(
        'halves-exchanged', 'modules/split_linear.py', 'first, second = weight.chunk(2)', 'second, first = weight.chunk(2)',
        "each half's gradient goes through the other's weights", SPLIT + 'test_gradients', 'nothing-float64',
    ),
    Mutation(
        'projection-not-cast', 'modules/split_linear.py', 'torch.is_autocast_enabled(device_type):', 'False:',
        'a projection under autocast computes in float32', SPLIT + 'test_gradients', 'nothing-autocast',
    ),
    Mutation(
        'wrapped-projection-passed-by', 'modules/split_linear.py', ' and is_bare(linear, x.device)', '',
        'adapters and hooks of in_proj do nothing', SPLIT + 'test_left_alone',
    ),
    Mutation(
        'weights-of-any-class', 'modules/split_linear.py', 'type(y) not in ORDINARY', 'False',
        'quantised weights are multiplied as they are stored', SPLIT + 'test_left_alone',
    ),
    Mutation(
        'part-of-the-gradient', 'modules/tensor_parallel.py', 'if x.requires_grad:', 'if False:',
        "the gradients of queries and keys are those of a rank's channels", PARALLEL + 'test_options', '[paper]',
    ),
    Mutation(
        'columns-not-exchanged', 'modules/tensor_parallel.py',
        'all_to_all_single_autograd(blocks.contiguous(), received, sent, self.mesh.get_group()).unbind(0)',
        'blocks.contiguous().unbind(0)', "values and gates are the columns that a rank's part of in_proj has",
        PARALLEL + 'test_options', '[paper]',
    ),
    Mutation(
        'heads-of-the-first-rank', 'modules/tensor_parallel.py', 'first = rank * heads // n', 'first = 0',
        'each rank takes the queries and keys of the first heads', PARALLEL + 'test_options', '[heads]',
    ),
]
