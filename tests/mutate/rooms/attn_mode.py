"""Mutations of `attn_mode='longhorn'` in fla's families, and of what is registered."""

from tests.mutate.mutation import TORCH, Mutation

CHANGES = 'tests/integration/test_attn_mode_options.py::TestConfigThatChanges::'

MUTATIONS = [
    Mutation(
        'saved-defaults-follow', 'attn_mode/config.py', 'setattr(config, PREFIX + name, default)', 'pass',
        "a later version's defaults change a saved model", CHANGES + 'test_a_saved_default_stays',
    ),
    Mutation(
        'options-of-the-first-model', 'attn_mode/config.py', 'if name not in FROM_FAMILY and not', 'if not',
        "channels do not follow the family's key", CHANGES + 'test_defaults_follow_the_family',
    ),
    Mutation(
        'own-forward', 'attn_mode/swap.py', '(shared if is_swapped(self.config) else forward)', '(forward)',
        "linear_attn's own forward drops boundaries", 'tests/models/test_boundaries.py::test_documents_one_by_one',
        'linear_attn', env=TORCH,
    ),
    Mutation(
        'loaded-weights-rescaled', 'attn_mode/mixer.py', "if getattr(self.out_proj.weight, '_is_hf_initialized', False):",
        'if False:', 'weights from a checkpoint are rescaled',
        'tests/models/test_longhorn.py::TestInitialisation::test_missing_weights_are_initialised_and_the_others_kept', 'rwkv6',
    ),
    Mutation(
        'swapped-mlp', 'attn_mode/swap.py', 'partial(become, cls=GatedMLP)', 'partial(become, cls=mlp.GatedMLP)',
        "LoRA on a swapped family's last projection does nothing",
        'tests/integration/test_adapters.py::test_every_adapter_counts', '[gla]', env=TORCH,
    ),
]
