"""What a request may ask for beside the likeliest tokens, compared with transformers."""

import torch
from vllm import SamplingParams

from tests.contrib.vllm.checkpoints import NEW_TOKENS, distributions, prompts

GREEDY = {'temperature': 0, 'max_tokens': NEW_TOKENS, 'ignore_eos': True, 'detokenize': False}
REQUESTS = [{'prompt_token_ids': x} for x in prompts()]
CLOSE = {'rtol': 0, 'atol': 1e-4}


def values(steps, tokens) -> torch.Tensor:
    return torch.tensor([step[token].logprob for step, token in zip(steps, tokens, strict=True)])


def test_samples(engine, variant):
    """Three samples for each prompt differ, are the same again from a seed, and have the probabilities that vLLM says."""
    checkpoint = variant('heads')
    llm = engine(checkpoint.folder)
    sampling = SamplingParams(**GREEDY | {'temperature': 1.0}, n=3, seed=5, logprobs=4)
    first, again = (llm.generate(REQUESTS, sampling, use_tqdm=False) for _ in range(2))
    assert [[x.token_ids for x in a.outputs] for a in first] == [[x.token_ids for x in a.outputs] for a in again]
    for prompt, request in zip(prompts(), first, strict=True):
        assert len({tuple(x.token_ids) for x in request.outputs}) == 3
        for sample in request.outputs:
            tokens = list(sample.token_ids)
            wanted = distributions(checkpoint.model, prompt, tokens)
            theirs, best = wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0], wanted.topk(4)
            torch.testing.assert_close(values(sample.logprobs, tokens), theirs, **CLOSE)
            for step, likeliest, log_p in zip(sample.logprobs, best[1].tolist(), best[0], strict=True):
                torch.testing.assert_close(values([step] * 4, likeliest), log_p, **CLOSE)
