"""A model with its cache as tensors: arguments that no call changes, and results."""

import pytest
import torch

from fla_longhorn import LonghornForCausalLM
from fla_longhorn_extras.with_states import WithStates
from tests.models.test_longhorn import small


@pytest.mark.parametrize('options', [{}, {'exact': True, 'num_heads': 2, 'conv_size': 2}], ids=['diagonal', 'exact'])
def test_one_token_at_a_time_is_one_call(options, device):
    program = WithStates(LonghornForCausalLM(small(**options)).to(device).eval())
    ids = torch.randint(53, (2, 70), device=device)
    with torch.no_grad():
        start = program.new_states(2)
        logits, *ends = program(ids, *start)
        torch.testing.assert_close(logits, program.model(ids).logits[:, -1])
        states = start
        for t in range(70):
            copies = [x.clone() for x in states]
            stepwise, *after = program(ids[:, t:t + 1], *states)
            assert all(map(torch.equal, states, copies))
            states = after
    for own, x in zip((stepwise, *states), (logits, *ends), strict=True):
        torch.testing.assert_close(own, x, atol=1e-5, rtol=1e-5)
    assert not any(x.any() for x in start)


def test_states_of_16_bit_models(device):
    """Those of the recurrence are float32."""
    program = WithStates(LonghornForCausalLM(small()).to(device, torch.bfloat16).eval())
    with torch.no_grad():
        _, *states = program(torch.ones(2, 3, dtype=torch.long, device=device), *program.new_states(2))
    for own, x in zip(states, program.new_states(2), strict=True):
        assert own.shape == x.shape and own.dtype == x.dtype
    assert [x.dtype for x in states] == [torch.float32, torch.bfloat16]


def test_models_without_such_states(device):
    with pytest.raises(TypeError, match='must be a LonghornForCausalLM, got LonghornModel'):
        WithStates(LonghornForCausalLM(small()).model)
    with pytest.raises(ValueError, match='attn must be None'):
        WithStates(LonghornForCausalLM(small(attn={'layers': [1], 'num_heads': 2})).to(device))
    program = WithStates(LonghornForCausalLM(small()).to(device))
    states = program.new_states(2)
    with pytest.raises(ValueError, match='must hold a recurrent_state of shape'):
        program(torch.ones(3, 1, dtype=torch.long, device=device), *states)
