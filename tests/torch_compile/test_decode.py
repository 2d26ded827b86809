"""Decoding with a compiled model: no compilation per step and no new state."""

import pytest
import torch

from tests.torch_compile.graphs import assert_equal, compiled
from tests.torch_compile.test_model import build

STEPS, PROMPT = 8, 6


def decode(prefill, step, ids, mask=None) -> tuple[torch.Tensor, list, list]:
    """Logits of all steps, the states' addresses at each, and the last states."""
    def masked(length):
        return None if mask is None else mask[:, :length].clone()

    output = prefill(ids[:, :PROMPT], attention_mask=masked(PROMPT), use_cache=True)
    cache, logits, addresses = output.past_key_values, [output.logits], []
    for t in range(PROMPT, PROMPT + STEPS):
        addresses.append([(x['recurrent_state'].data_ptr(), x['conv_state'].data_ptr()) for x in cache])
        output = step(ids[:, t:t + 1], attention_mask=masked(t + 1), past_key_values=cache, use_cache=True)
        assert output.past_key_values is cache
        logits.append(output.logits)
    assert cache.get_seq_length() == PROMPT + STEPS
    return torch.cat(logits, 1), addresses, list(cache)


@pytest.mark.parametrize(('mode', 'padding', 'exact'), [
    (torch.inference_mode, 'left', True), pytest.param(torch.no_grad, None, False, marks=pytest.mark.slow),
    pytest.param(torch.inference_mode, 'anywhere', False, marks=pytest.mark.slow),
])
def test_steps(mode, padding, exact, device):
    model = build(device, layers=2, exact=exact, num_heads=2).eval()
    ids = torch.randint(53, (3, PROMPT + STEPS), device=device)
    mask = None
    if padding is not None:
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
    if padding == 'anywhere':
        mask[1, [2, 7, 8, 12]] = 0
    function, counter = compiled(model)
    with mode():
        expected, _, expected_states = decode(model, model, ids, mask)
        logits, addresses, states = decode(model, function, ids, mask)
    # one for the number of tokens first seen in the cache, one for any other
    assert counter.frame_count == 2
    assert all(x == addresses[0] for x in addresses)
    assert_equal({'logits': logits}, {'logits': expected})
    for got, ref in zip(states, expected_states, strict=True):
        assert_equal(*({name: x[name] for name in ('recurrent_state', 'conv_state')} for x in (got, ref)))
