"""The comparison with `generate` notices each way to mix up the states: a mistake is put in, and tokens differ."""

import pytest
import torch

pytest.importorskip('vllm', reason='make test-serving has vLLM')


def is_prompt(call: dict) -> bool:
    return 'cu_seqlens' in call


# what is done to the arguments of a call that updates states, and which of two turns show it
FAULTS = {
    'decoding keeps no state': (lambda states, call: (states if is_prompt(call) else states.clone(), call), [False, False]),
    'prompts keep no state': (lambda states, call: (states.clone() if is_prompt(call) else states, call), [False, False]),
    'a piece starts from zero': (
        lambda states, call: (states, replace(call, 'has_initial_state', torch.zeros_like)), [False, False],
    ),
    "a prompt starts from another request's page": (
        lambda states, call: (states, replace(call, 'has_initial_state', torch.ones_like)), [True, False],
    ),
    'requests swap their pages': (
        lambda states, call: (states, call if is_prompt(call) else replace(call, 'state_indices', torch.flip, (0,))),
        [False, False],
    ),
}


def replace(call: dict, name: str, function, *args) -> dict:
    return {**call, name: function(call[name], *args)} if name in call else call


@pytest.mark.parametrize('fault', FAULTS)
def test_states(serve, monkeypatch, fault):
    from fla_longhorn.contrib.vllm import mixer

    change, expected = FAULTS[fault]
    update = mixer.longhorn_state_update

    def wrong(states, **call):
        states, call = change(states, call)
        return update(states, **call)

    monkeypatch.setattr(mixer, 'longhorn_state_update', wrong)
    assert serve('paper', max_num_batched_tokens=32)[0] == expected


@pytest.mark.parametrize(('known', 'expected'), [(torch.zeros_like, [False, False]), (torch.ones_like, [True, False])])
def test_convolution(serve, monkeypatch, known, expected):
    """A piece whose convolution starts from zero, and a prompt that starts from another request's inputs."""
    from fla_longhorn.contrib.vllm import mixer

    convolve = mixer.causal_conv1d_fn
    monkeypatch.setattr(mixer, 'causal_conv1d_fn', lambda *args, has_initial_state, **call: convolve(
        *args, has_initial_state=known(has_initial_state), **call,
    ))
    assert serve('paper', max_num_batched_tokens=32)[0] == expected
