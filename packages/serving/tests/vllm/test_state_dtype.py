"""A state kept in 16 bits is rounded between vLLM's calls, and nowhere else."""

import pytest
import torch

from packages.serving.tests.checkpoints import all_log_probabilities, prompts, served_log_probabilities


def rounded_log_probabilities(model, prompt: list[int], tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Of each of `tokens`, with the state rounded after each call of the model."""
    ids, cache, found = torch.tensor([prompt]), None, []
    with torch.no_grad():
        for token in tokens:
            out = model(ids, past_key_values=cache, use_cache=True)
            found.append(out.logits[0, -1].log_softmax(-1)[token])
            cache, ids = out.past_key_values, torch.tensor([[token]])
            for layer in cache:
                layer['recurrent_state'].copy_(layer['recurrent_state'].to(dtype))
    return torch.stack(found)


@pytest.mark.parametrize(('name', 'options', 'dtype'), [
    ('paper', {'mamba_cache_dtype': 'float32', 'mamba_ssm_cache_dtype': 'bfloat16'}, torch.bfloat16),
    ('exact', {'mamba_ssm_cache_dtype': 'float16'}, torch.float16),
    ('gate-channel', {'mamba_ssm_cache_dtype': 'bfloat16'}, torch.bfloat16),
])
def test_log_probabilities(engine, variant, name, options, dtype):
    model = variant(name).model
    tokens, served = served_log_probabilities(engine(variant(name).folder, **options))
    wanted = all_log_probabilities(model, tokens)
    rounded = torch.stack([rounded_log_probabilities(model, *pair, dtype) for pair in zip(prompts(), tokens, strict=True)])
    error, of_rounding = (served - wanted).norm(), (rounded - wanted).norm()
    print(f'{dtype}: {error / wanted.norm():.1e} of the log-probabilities')
    assert 0.5 * of_rounding < error < 1.5 * of_rounding
