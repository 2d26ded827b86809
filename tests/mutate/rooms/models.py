"""Mutations of Longhorn's models."""

from tests.mutate.mutation import TORCH, Mutation

MODEL = 'tests/models/test_longhorn.py::'
OFFICIAL = 'packages/extras/tests/test_official.py::test_official_checkpoint'
CACHE = 'tests/models/test_cache.py::'
LOSS = 'tests/models/test_causal_lm.py::'
ADAPTERS = 'tests/integration/test_adapters.py::'
MODELLING = 'models/longhorn/modeling_longhorn.py'
CAUSAL = 'models/causal_lm.py'
BACK = 'tests/models/test_rewind.py::'

MUTATIONS = [
    Mutation(
        'norm-of-all-rows', 'packages/extras/fla_longhorn_extras/batch_invariant.py', 'RMSNorm: BlockRMSNorm,', '',
        'the norms of a batch-invariant model have as many rows as there are tokens',
        'packages/extras/tests/test_batch_invariant.py::test_rows_of_each_call', '[norm]',
    ),
    Mutation(
        'skip-uninitialised', MODELLING, 'nn.init.ones_(module.D)', 'pass', 'D is not initialised on a model from meta',
        MODEL + 'TestInitialisation::test_weights', 'meta',
    ),
    Mutation(
        'labels-shifted-twice', CAUSAL, "kwargs['labels'] = ShiftedLabels(shift_labels)", 'pass',
        'labels that are shifted already are ignored', LOSS + 'test_shifted_labels', 'longhorn', env=TORCH,
    ),
    Mutation(
        'look-ahead-in-attention', 'modules/attention.py', 'if not use_cache:', 'if use_cache:',
        'a call with use_cache=False puts keys into the cache',
        CACHE + 'test_a_look_ahead_changes_nothing', '[hybrid-1-inference_mode-False]', env=TORCH,
    ),
    Mutation(
        'official-bias', 'packages/extras/fla_longhorn_extras/official.py', r'dt_head\.(?P<p>weight|bias)',
        r'dt_head\.(?P<p>weight)',
        "the authors' checkpoints do not load", OFFICIAL,
    ),
    Mutation(
        'loss-not-divided', CAUSAL, 'loss = loss / (num_items_in_batch + (num_items_in_batch == 0))', 'pass',
        'gradient accumulation is not normalised',
        LOSS + 'test_losses_agree_with_autograd', '[plain]', env=TORCH,
    ),
    Mutation(
        'adapter-ignored', 'modules/bare.py',
        "if forward is None or type(module).forward is not forward or 'forward' in module.__dict__:", 'if False:',
        "LoRA on the MLP's last projection does nothing", ADAPTERS + 'test_every_adapter_counts', '[mlp]', env=TORCH,
    ),
    Mutation(
        'padding-after-the-end', 'models/base.py', 'ended.mask(input_ids, attention_mask)', 'attention_mask',
        'rows that have ended read padding', 'tests/models/test_generation.py::test_a_conversation_in_a_batch',
        'hybrid-greedy', env=TORCH,
    ),
    Mutation(
        'masks-unread', 'models/call.py', 'if known.shape == told.shape and not torch.equal(known, told):', 'if False:',
        'a mask that comes later says something else than what was read',
        'tests/models/test_generation.py::test_a_mask_that_disagrees', 'paper', env=TORCH,
    ),
    Mutation(
        'kept-tokens-lost', 'modules/cache.py', 'self.missing = length - self.get_seq_length()', 'self.missing = 0',
        'what a crop keeps of a call is not read again', BACK + 'test_assisted_generation', 'another paper',
        env=TORCH,
    ),
    Mutation(
        'columns-to-come', 'modules/boundaries.py', '<= mask.shape[1] <= seen + T', '<= mask.shape[1]',
        'the last columns of a longer mask are taken for those of the call',
        'tests/layers/test_attention_mask.py::test_columns_for_tokens_to_come', 'paper model', env=TORCH,
    ),
    Mutation(
        'keys-counted-as-tokens', 'models/call.py', 'cast(Any, cache).layers[i]._seen_tokens = max(counts)', 'pass',
        'states that were read from a file go on at the wrong positions of a window',
        'tests/models/test_states.py::test_goes_on', 'small window dictionaries one', env=TORCH,
    ),
    Mutation(
        'snapshots-in-the-old-order', 'modules/cache.py', 'cache._transform_states(function)', 'pass',
        'a crop goes back to rows in the order before they were selected',
        'tests/models/test_states.py::test_cropped_after_reordering', 'diagonal padded', env=TORCH,
    ),
]
