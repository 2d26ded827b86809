"""The example of prompts in files: the command runs, leaves its files, and notices an answer with other bits."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from examples.prompt.__main__ import main
from examples.prompt.config import RunArguments
from examples.prompt.states import load, save
from tests.models.test_cache import build

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
    def changed(path, model):
        cache = load(path, model)
        state = cache[1]['recurrent_state']
        state.copy_(torch.nextafter(state, torch.full_like(state, torch.inf)))
        return cache

    monkeypatch.setattr('examples.prompt.__main__.load', changed)
    code, report = run_command(tmp_path, device)
    assert code == 1 and report['different'] == [0, 1] and report['batch_is_equal'] is False


def swap(tensors, about):
    tensors['0.recurrent_state'], tensors['1.recurrent_state'] = tensors['1.recurrent_state'], tensors['0.recurrent_state']


@pytest.mark.parametrize('change', [
    swap,
    lambda tensors, about: tensors.pop('1.conv_state'),
    lambda tensors, about: tensors.update({'0.conv_state': tensors['0.conv_state'].half()}),
    lambda tensors, about: about.update(tokens='6'),
    lambda tensors, about: about.update(weights=''),
    lambda tensors, about: about.clear(),
])
@torch.no_grad()
def test_what_is_not_as_it_was_written(change, tmp_path, device):
    model, path = build(device), tmp_path / 'states'
    save(model(torch.ones(2, 5, dtype=torch.long, device=device), use_cache=True).past_key_values, path, model)
    load(path, model)
    tensors = load_file(path)
    with safe_open(path, 'pt') as file:
        about = file.metadata()
    change(tensors, about)
    save_file(tensors, path, metadata=about)
    with pytest.raises(ValueError, match='path must be of a file as save wrote it'):
        load(path, model)


@torch.no_grad()
def test_whose_states_they_are(tmp_path, device):
    """Those of the same weights, whatever else their config says; not of others, another dtype or another update."""
    model, path, mask = build(device), tmp_path / 'states', torch.ones(2, 5, dtype=torch.long, device=device)
    mask[0, :2] = 0
    cache = model(mask, mask, use_cache=True).past_key_values
    save(cache, path, model)
    model.save_pretrained(tmp_path / 'model')
    same = type(model).from_pretrained(tmp_path / 'model', recompute=False, use_cache=False, eos_token_id=5).to(device)
    got, more = load(path, same), mask.new_ones(2, 1)
    wanted = model(more, torch.cat([mask, more], 1), past_key_values=cache, use_cache=True).logits
    assert torch.equal(same(more, torch.cat([mask, more], 1), past_key_values=got, use_cache=True).logits, wanted)
    exact = build(device, exact=True)
    exact.load_state_dict(model.state_dict())
    for other in (exact, build(device), same.bfloat16()):
        with pytest.raises(ValueError, match="of this model's weights"):
            load(path, other)


@pytest.mark.parametrize(('name', 'options'), [
    ('prompt_tokens', {'prompt_tokens': 0}),
    ('hidden_size', {'hidden_size': 40, 'head_dim': 16}),
    ('device', {'device': 'tpu'}),
])
def test_bad_options(name, options):
    with pytest.raises(ValueError, match=f'^{name} must be'):
        RunArguments(**options)
