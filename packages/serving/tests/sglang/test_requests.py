"""What a request may ask for beside the likeliest tokens, compared with transformers."""

import torch

from packages.serving.tests.checkpoints import distributions, log_probabilities, prompts
from packages.serving.tests.sglang.conftest import GREEDY

CLOSE = {'rtol': 0, 'atol': 1e-4}


def values(steps) -> torch.Tensor:
    return torch.tensor([step[0] for step in steps])


def test_samples(engine, variant):
    """Three samples for each prompt differ, and have the probabilities that SGLang says, as the four likeliest tokens do."""
    checkpoint = variant('heads')
    outputs = engine(checkpoint.folder).generate(
        input_ids=prompts(), sampling_params=GREEDY | {'temperature': 1.0, 'n': 3}, return_logprob=True, top_logprobs_num=4,
    )
    assert len(outputs) == 3 * len(prompts())
    for i, prompt in enumerate(prompts()):
        samples = outputs[3 * i:3 * i + 3]
        assert len({tuple(x['output_ids']) for x in samples}) == 3
        for sample in samples:
            tokens, told = sample['output_ids'], sample['meta_info']
            wanted = distributions(checkpoint.model, prompt, tokens)
            theirs = wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            torch.testing.assert_close(values(told['output_token_logprobs']), theirs, **CLOSE)
            for step, row in zip(told['output_top_logprobs'], wanted, strict=True):
                best = row.topk(4)
                assert [x[1] for x in step] == best.indices.tolist()
                torch.testing.assert_close(values(step), best.values, **CLOSE)


def test_log_probabilities_of_prompts(engine, variant):
    """Read in pieces of 32 tokens."""
    checkpoint = variant('paper')
    outputs = engine(checkpoint.folder, chunked_prefill_size=32).generate(
        input_ids=prompts(), sampling_params=GREEDY, return_logprob=True, logprob_start_len=0,
    )
    for prompt, output in zip(prompts(), outputs, strict=True):
        first, *steps = output['meta_info']['input_token_logprobs']
        assert first[0] is None and len(steps) == len(prompt) - 1
        torch.testing.assert_close(values(steps), log_probabilities(checkpoint.model, prompt[:1], prompt[1:]), **CLOSE)
