"""Mutations of the layer and of the modules that it is built from."""

from tests.mutate.mutation import TORCH, Mutation

CACHE = 'tests/layers/test_cache.py::'
LAYER = 'tests/layers/test_longhorn.py::'
DECAY = 'tests/layers/test_weight_decay.py::test_layer'
BOUNDARIES = 'tests/models/test_boundaries.py::'
COMPILED = 'tests/torch_compile/'
RECOMPUTE = 'tests/layers/test_recompute.py::'

MUTATIONS = [
    Mutation(
        'look-ahead-writes-the-state', 'layers/longhorn.py', 'q_len == 1 and use_cache and can_update_in_place(',
        'q_len == 1 and can_update_in_place(', 'a call with use_cache=False overwrites the state of the cache',
        CACHE + 'test_a_look_ahead_changes_nothing', '[False-1-no_grad-]', env=TORCH,
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
        'backward computes again in another dtype', RECOMPUTE + 'test_gradients_of_a_layer', 'exact-autocast',
    ),
]
