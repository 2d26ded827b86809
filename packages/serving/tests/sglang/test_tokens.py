"""SGLang gives the tokens of `generate` in float32, however it schedules the requests."""

import asyncio

import pytest
import torch

from packages.serving.tests.checkpoints import GATED, generate, log_probabilities, prompts
from packages.serving.tests.sglang.conftest import GREEDY

WITHOUT_CACHE = {'disable_radix_cache': True}


def test_lengths_and_cancelled_requests(engine, variant):
    """Requests end at different times, one is cancelled in the middle: others keep their tokens, and slots are free again."""
    checkpoint = variant('paper')
    served = engine(checkpoint.folder, **WITHOUT_CACHE)
    lengths = [1, 24, 5, 9, 24, 2, 17, 24]

    async def ask(i: int, length: int, cancel: bool = False) -> list[int]:
        stream = await served.async_generate(
            input_ids=prompts()[i], sampling_params=GREEDY | {'max_new_tokens': length}, stream=True, rid=f'{i}-{length}',
        )
        tokens: list[int] = []
        async for output in stream:
            tokens = output['output_ids']
            if cancel and len(tokens) >= 3:
                served.tokenizer_manager.abort_request(f'{i}-{length}')
        return tokens

    async def turn() -> list[list[int]]:
        return await asyncio.gather(*(ask(i, n, cancel=i == 7) for i, n in enumerate(lengths)))

    for _ in range(3):
        *whole, cancelled = served.loop.run_until_complete(turn())
        assert whole == [x[:n] for x, n in zip(checkpoint.tokens, lengths[:-1], strict=False)]
        assert 3 <= len(cancelled) < 24 and cancelled == checkpoint.tokens[7][:len(cancelled)]
    outputs = served.generate(input_ids=prompts(), sampling_params=GREEDY)
    assert [x['output_ids'] for x in outputs] == checkpoint.tokens


@pytest.mark.parametrize(('name', 'repeat', 'options'), [
    ('paper', 1, {}),
    # prompts in pieces of 32 tokens, more requests than slots
    ('heads', 3, {'chunked_prefill_size': 32, 'max_running_requests': 4, 'max_mamba_cache_size': 4}),
    # pieces of prompts share a batch with decoding requests
    ('exact-heads', 1, {'chunked_prefill_size': 32, 'enable_mixed_chunk': True}),
    ('exact', 1, {'disable_overlap_schedule': True}),
    *((name, 1, {'chunked_prefill_size': 32, 'enable_mixed_chunk': True}) for name in GATED),
], ids=str)
def test_batch(engine, variant, name, repeat, options):
    """In two turns, so that slots are used again; with the log-probabilities of the tokens."""
    checkpoint = variant(name)
    served = engine(checkpoint.folder, **WITHOUT_CACHE | options)
    for _ in range(2):
        outputs = served.generate(input_ids=prompts() * repeat, sampling_params=GREEDY, return_logprob=True)
        assert [x['output_ids'] for x in outputs] == checkpoint.tokens * repeat
    for prompt, output in zip(prompts() * repeat, outputs, strict=True):
        found = torch.tensor([x[0] for x in output['meta_info']['output_token_logprobs']])
        wanted = log_probabilities(checkpoint.model, prompt, output['output_ids'])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_retraction(engine, variant):
    """A request that has to wait for memory in the middle of its answer is read again."""
    checkpoint = variant('heads')
    served = engine(checkpoint.folder, **WITHOUT_CACHE, max_total_tokens=420, schedule_conservativeness=0.0)
    retractions = []
    # with a known length of the answer it would not have been started; after a retraction, SGLang starts fewer at once
    for _ in range(2):
        outputs = served.generate(input_ids=prompts(), sampling_params=GREEDY | {'ignore_eos': False})
        assert [x['output_ids'] for x in outputs] == checkpoint.tokens
        retractions.append(sum(x['meta_info']['num_retractions'] for x in outputs))
    assert sum(retractions) > 0, retractions


def test_prefix_cache(engine, variant):
    """An answer and more tokens continue from the state at the answer's end."""
    checkpoint = variant('paper')
    served = engine(checkpoint.folder, max_mamba_cache_size=64)
    first = served.generate(input_ids=prompts(), sampling_params=GREEDY)
    assert [x['output_ids'] for x in first] == checkpoint.tokens
    longer = [[*prompt, *tokens, 7, 8] for prompt, tokens in zip(prompts(), checkpoint.tokens, strict=True)]
    for _ in range(2):
        again = served.generate(input_ids=longer, sampling_params=GREEDY)
        assert [x['output_ids'] for x in again] == [generate(checkpoint.model, x) for x in longer]
    # the last token of an answer has not been read
    assert [x['meta_info']['cached_tokens'] for x in again] == [len(x) - 3 for x in longer]
