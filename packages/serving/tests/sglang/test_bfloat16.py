"""In bfloat16 tokens may differ; the log-probabilities are as near to float32 as those of transformers in bfloat16."""

import copy

import pytest
import torch

from packages.serving.tests.checkpoints import all_log_probabilities, prompts
from packages.serving.tests.sglang.conftest import GREEDY


@pytest.mark.parametrize('name', ['heads', 'exact'])
def test_log_probabilities(engine, variant, name):
    checkpoint = variant(name)
    served = engine(checkpoint.folder, dtype='bfloat16')
    outputs = served.generate(input_ids=prompts(), sampling_params=GREEDY, return_logprob=True)
    found = torch.tensor([[x[0] for x in output['meta_info']['output_token_logprobs']] for output in outputs])
    models = checkpoint.model, copy.deepcopy(checkpoint.model).bfloat16()
    wanted, other = (all_log_probabilities(model, [x['output_ids'] for x in outputs]) for model in models)
    assert 0 < (found - wanted).norm() <= 1.5 * (other - wanted).norm()
