"""The example of prompts in files: the command runs, leaves its files, and notices an answer with other bits."""

import json

import pytest
import torch

from examples.prompt.__main__ import main
from examples.prompt.config import RunArguments
from fla_longhorn.modules.rewind import RewindableCache

SMALL = {
    'hidden_size': 32, 'num_hidden_layers': 2, 'state_size': 4, 'head_dim': 16, 'vocab_size': 50, 'prompt_tokens': 40,
    'question_tokens': 3, 'num_questions': 2, 'answer_tokens': 3,
}


def run_command(folder, device, **changes) -> tuple[int, dict]:
    named = SMALL | changes | {'output_dir': folder, 'device': device}
    code = main([f'--{name}={value}' for name, value in named.items()])
    return code, json.loads((folder / 'prompt.json').read_text())


@pytest.mark.parametrize('exact', [False, True])
def test_the_command(exact, tmp_path, device):
    code, report = run_command(tmp_path, device, exact=exact)
    assert code == 0 and report['different'] == [] and report['batch_is_equal'] is True
    assert report['file_bytes'] == (tmp_path / 'prompt.safetensors').stat().st_size
    # keys and values of two layers, in float32
    assert report['transformer_cache_bytes'] == 2 * 2 * 40 * 32 * 4
    assert all(len(x) == 2 and min(x) > 0 for x in report['seconds_to_first_token'].values())


def test_the_file_does_not_grow_with_the_prompt(tmp_path, device):
    sizes = [run_command(tmp_path, device, prompt_tokens=n)[1]['file_bytes'] for n in (40, 80)]
    assert sizes[0] == sizes[1]


def test_other_bits_are_noticed(tmp_path, device, monkeypatch):
    load = RewindableCache.load

    def changed(path, model):
        cache = load(path, model)
        state = cache[1]['recurrent_state']
        state.copy_(torch.nextafter(state, torch.full_like(state, torch.inf)))
        return cache

    monkeypatch.setattr(RewindableCache, 'load', changed)
    code, report = run_command(tmp_path, device)
    assert code == 1 and report['different'] == [0, 1] and report['batch_is_equal'] is False


@pytest.mark.parametrize(('name', 'options'), [
    ('prompt_tokens', {'prompt_tokens': 0}),
    ('hidden_size', {'hidden_size': 40, 'head_dim': 16}),
    ('device', {'device': 'tpu'}),
])
def test_bad_options(name, options):
    with pytest.raises(ValueError, match=f'^{name} must be'):
        RunArguments(**options)
