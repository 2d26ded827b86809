"""Mutations of `attn_mode='longhorn'` in fla's families, and of what is registered."""

from tests.mutate.mutation import TORCH, Mutation

SWAP = 'tests/integration/test_attn_mode.py::'
OPTIONS = 'tests/integration/test_attn_mode_options.py::'
CALLS = 'tests/integration/test_swapped_calls.py::'
DEFAULTS = OPTIONS + 'test_defaults_fit_the_family'
ADAPTERS = 'tests/integration/test_adapters.py::'
LOSS = 'tests/models/test_causal_lm.py::'
CHANGES = OPTIONS + 'TestConfigThatChanges::'

MUTATIONS = [
    Mutation(
        'channels-of-another-family', 'attn_mode/families.py', "'CombaBlock', 'Comba', by_heads", "'CombaBlock', 'Comba'",
        "the mixer has other channels than the family's own", OPTIONS + 'test_as_many_channels_as_the_native_mixer', '[comba]',
    ),
    Mutation(
        'heads-without-expansion', 'attn_mode/families.py', "config.head_dim * getattr(config, 'expand_v', 1)",
        'config.head_dim',
        "the mixer ignores the family's expand_v", DEFAULTS, 'gated_deltanet',
    ),
    Mutation(
        'value-heads', 'attn_mode/families.py', "getattr(config, 'num_v_heads', None) or ", '',
        'query heads count in place of value heads', DEFAULTS, 'gated_deltanet',
    ),
    Mutation(
        'heads-that-do-not-divide', 'attn_mode/config.py', 'math.gcd(FAMILIES[config.model_type].heads(config), channels)',
        'FAMILIES[config.model_type].heads(config)',
        'heads that do not divide the channels are not reduced', DEFAULTS, 'gated_deltanet',
    ),
    Mutation(
        'convolution-bias', 'attn_mode/config.py', "for name in ('conv_size', 'conv_bias'):", "for name in ('conv_size',):",
        "the convolution ignores the family's bias", DEFAULTS, 'cyclic_flow_attention',
    ),
    Mutation(
        'unknown-option', 'attn_mode/config.py', 'if unknown := sorted(present.keys() - OPTIONS.keys()):',
        'if unknown := sorted(OPTIONS.keys() - OPTIONS.keys()):', 'a misspelt option is ignored',
        OPTIONS + 'test_unknown_option',
    ),
    Mutation(
        'saved-defaults-follow', 'attn_mode/config.py', 'if name not in derived or name not in FROM_FAMILY}',
        'if name not in derived}', "a later version's defaults change a saved model", CHANGES + 'test_a_saved_default_stays',
    ),
    Mutation(
        'defaults-stay', 'attn_mode/config.py',
        'given = {name: value for name, value in present.items() if name not in derived or '
        'name not in FROM_FAMILY}', 'given = present', "what was filled in does not follow the family's keys",
        CHANGES + 'test_defaults_follow_the_family',
    ),
    Mutation(
        'settings-unset', 'attn_mode/config.py',
        'replaced[name] = getattr(config, name)\n            setattr(config, name, value)',
        'replaced[name] = getattr(config, name)', "HGRN's lower bounds are parameters without a gradient",
        SWAP + 'test_one_training_step', '[hgrn]', env=TORCH,
    ),
    Mutation(
        'settings-kept', 'attn_mode/config.py', ".settings[name]:\n            setattr(config, name, value)",
        ".settings[name]:\n            pass", 'a config switched back keeps what Longhorn had set',
        CHANGES + 'test_switched_back',
        '[hgrn]',
    ),
    Mutation(
        'derived-kept', 'attn_mode/config.py', 'vars(config).pop(PREFIX + name, None)', 'pass',
        'a config switched back keeps options of Longhorn', CHANGES + 'test_switched_back', '[gla]',
    ),
    Mutation(
        'block-alone', 'attn_mode/swap.py', 'if not settle(config):\n            init',
        'if not is_swapped(config):\n            init',
        "a block built without a model gets an unchecked config", CHANGES + 'test_a_block_without_a_model', env=TORCH,
    ),
    Mutation(
        'own-forward', 'attn_mode/swap.py', '(shared if is_swapped(self.config) else forward)', '(forward)',
        "linear_attn's own forward drops boundaries", CALLS + 'test_documents_one_by_one', 'linear_attn', env=TORCH,
    ),
    Mutation(
        'first-values', 'attn_mode/families.py', '        after_build=append_v_first,\n', '',
        "RWKV7's blocks miss the first layer's values", SWAP + 'test_one_training_step', '[rwkv7]', env=TORCH,
    ),
    Mutation(
        'attention-over-ranks', 'attn_mode/swap.py', 'if isinstance(module, RowwiseAttention):', 'if False:',
        'attention leaves out what other ranks hold', 'tests/distributed/test_layer.py::test_attention_layers_are_refused',
        'gla', env=TORCH,
    ),
    Mutation(
        'hybrid-ignored', 'attn_mode/swap.py', 'if attention is not None:', 'if False:',
        'families without hybrid layers of their own get none', SWAP + 'test_hybrid', env=TORCH,
    ),
    Mutation(
        'pending-states', 'attn_mode/families.py', 'RodimusPlusMixer if', 'LonghornMixer if',
        "Rodimus+ finds the mixer's state where its attention's should be", SWAP + 'test_generation_with_cache', '[-rodimus]',
        env=TORCH,
    ),
    Mutation(
        'skip-uninitialised', 'attn_mode/mixer.py', 'nn.init.ones_(self.D)', 'pass',
        'D is not initialised where a checkpoint lacks it',
        SWAP + 'test_partly_loaded',
    ),
    Mutation(
        'steps-by-the-family', 'attn_mode/mixer.py', 'self.beta_proj.reset_parameters()', 'pass',
        "step sizes are initialised by the family's rule", SWAP + 'test_initialisation',
    ),
    Mutation(
        'loaded-weights-rescaled', 'attn_mode/mixer.py', "if getattr(self.out_proj.weight, '_is_hf_initialized', False):",
        'if False:',
        'weights from a checkpoint are rescaled', SWAP + 'test_partly_loaded', 'rwkv6',
    ),
    Mutation(
        'copy-handed-back', 'models/swapped.py', "known['past_key_values'].looks_ahead_of = cache", 'pass',
        'a call with use_cache=False returns a cache that it has changed', CALLS + 'test_a_look_ahead_changes_nothing',
        '-gla]',
        env=TORCH,
    ),
    Mutation(
        'swapped-look-ahead', 'models/swapped.py', 'elif not use_cache and cache is not None:',
        'elif use_cache and cache is not None:',
        "a call with use_cache=False updates the family's attention states", CALLS + 'test_a_look_ahead_changes_nothing',
        'hybrid-gla]', env=TORCH,
    ),
    Mutation(
        'registered-twice', 'patches/apply.py', 'if parts.get(name) and name not in _applied', 'if parts.get(name)',
        'registering twice wraps everything twice', OPTIONS + 'test_registering_again_changes_nothing',
    ),
    Mutation(
        'trainer-decays', 'layers/weight_decay.py', 'if isinstance(model, NoWeightDecay) else names', 'if False else names',
        "transformers' Trainer decays D", 'tests/integration/test_weight_decay.py::test_a_step_without_gradient',
    ),
    Mutation(
        'swapped-mlp', 'attn_mode/swap.py', 'partial(become, cls=GatedMLP)', 'partial(become, cls=mlp.GatedMLP)',
        "LoRA on a swapped family's last projection does nothing", ADAPTERS + 'test_every_adapter_counts', '[gla]', env=TORCH,
    ),
    Mutation(
        'swapped-shifted-labels', 'models/swapped.py', "kwargs['shift_labels'], labels = labels.labels, None",
        'labels = labels.labels', 'labels that are shifted already are shifted again', LOSS + 'test_shifted_labels',
        'train-gla]', env=TORCH,
    ),
    Mutation(
        'swapped-logits', 'patches/parts.py', "'_compute_logits_and_loss', wrap_forward, logits_and_loss)",
        "'_compute_logits_and_loss', lambda function: function)",
        "a swapped family's logits are their gradient after backward", LOSS + 'test_logits_stay', '[gla]', env=TORCH,
    ),
    Mutation(
        'flash-attn-for-all', 'patches/apply.py', "if name != 'flash_attn'", "if name",
        "native models of fla are built where they raise without the plugin",
        'tests/integration/test_native.py::test_same_numbers',
    ),
    Mutation(
        'labels-of-others-shifted', 'attn_mode/swap.py', 'self._get_name = listed_name', 'pass',
        "the Trainer smooths a swapped family's labels at the wrong tokens",
        'tests/models/test_classification.py::test_label_smoothing_of_the_trainer',
    ),
]
