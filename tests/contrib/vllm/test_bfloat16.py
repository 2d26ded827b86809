"""In bfloat16 tokens may differ; the log-probabilities are as near to float32 as those of transformers in bfloat16."""

import copy

import pytest
import torch
from vllm import SamplingParams

from tests.contrib.vllm.checkpoints import log_probabilities, prompts


@pytest.mark.parametrize('name', ['heads', 'exact', 'hybrid'])
def test_log_probabilities(engine, variant, name):
    checkpoint = variant(name)
    llm = engine(checkpoint.folder, dtype='bfloat16')
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = [x.outputs[0] for x in llm.generate([{'prompt_token_ids': x} for x in prompts()], sampling, use_tqdm=False)]
    tokens = [list(x.token_ids) for x in outputs]
    served = torch.tensor([
        [step[token].logprob for step, token in zip(x.logprobs, some, strict=True)]
        for x, some in zip(outputs, tokens, strict=True)
    ])

    def of(model) -> torch.Tensor:
        return torch.stack([log_probabilities(model, *pair) for pair in zip(prompts(), tokens, strict=True)])

    wanted, other = of(checkpoint.model), of(copy.deepcopy(checkpoint.model).bfloat16())
    assert 0 < (served - wanted).norm() <= 1.5 * (other - wanted).norm()
