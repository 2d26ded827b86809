"""Speculative decoding by n-grams gives the tokens of `generate`, though drafts are rejected."""

import pytest
from vllm import SamplingParams

from packages.serving.tests.checkpoints import NEW_TOKENS, build, generate, prompts

DRAFTS = {'method': 'ngram', 'num_speculative_tokens': 3, 'prompt_lookup_min': 1, 'prompt_lookup_max': 3}
# so few that an n-gram was often followed by the token that comes next
VOCAB = 6


# the third has pages for three requests
@pytest.mark.parametrize(('name', 'options'), [
    ('paper', {}), ('exact-heads', {'max_num_batched_tokens': 32}), ('heads', {'num_gpu_blocks_override': 13}),
    ('hybrid', {'max_num_batched_tokens': 32, 'enable_prefix_caching': False}),
    ('exact-gate-head', {'max_num_batched_tokens': 32}), ('gate-channel', {}), ('paper', {'enforce_eager': False}),
], ids=str)
def test_drafts(engine, tmp_path, name, options):
    """With drafts accepted, rejected, and accepted in part, in requests of one batch."""
    model = build(name, tmp_path, vocab_size=VOCAB)
    requests = [[token % VOCAB for token in prompt] for prompt in prompts()]
    wanted = [generate(model, prompt) for prompt in requests]
    llm = engine(tmp_path, speculative_config=DRAFTS, **options)
    scheduler, steps = llm.llm_engine.engine_core.engine_core.scheduler, []
    update = scheduler.update_from_output

    def spy(scheduled, output):
        tokens = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        steps.append([(len(drafts), len(tokens[i]) - 1) for i, drafts in scheduled.scheduled_spec_decode_tokens.items()])
        return update(scheduled, output)

    scheduler.update_from_output = spy
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    for _ in range(2):
        outputs = llm.generate([{'prompt_token_ids': x} for x in requests], sampling, use_tqdm=False)
        assert [list(x.outputs[0].token_ids) for x in outputs] == wanted
    pairs = {pair for step in steps for pair in step}
    assert {(3, 0), (3, 1), (3, 2), (3, 3)} <= pairs
    assert any(len({accepted for _, accepted in step}) > 1 for step in steps)


def test_refused(engine, variant):
    folder = variant('hybrid').folder
    with pytest.raises(ValueError, match='enable_prefix_caching must be False with speculative_config'):
        engine(folder, speculative_config=DRAFTS)
    with pytest.raises(ValueError, match="speculative_config must have method 'ngram' .* got 'draft_model'"):
        engine(folder, speculative_config={'method': 'draft_model', 'model': str(folder), 'num_speculative_tokens': 3})
