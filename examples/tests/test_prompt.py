"""States in files: what was changed since, or is of other weights, is refused."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from examples.prompt.states import load, save
from tests.models.test_cache import VARIANTS, build, make


def swap(tensors, about):
    tensors['0.recurrent_state'], tensors['1.recurrent_state'] = tensors['1.recurrent_state'], tensors['0.recurrent_state']


@pytest.mark.parametrize('change', [
    swap,
    lambda tensors, about: tensors.pop('1.conv_state'),
    lambda tensors, about: tensors.update({'0.conv_state': tensors['0.conv_state'].half()}),
    lambda tensors, about: tensors.update(tokens=tensors['tokens'] + 1),
    lambda tensors, about: tensors.pop('read'),
    lambda tensors, about: about.update(weights=''),
    lambda tensors, about: about.clear(),
])
@torch.no_grad()
def test_what_is_not_as_it_was_written(change, tmp_path, device):
    model, path, mask = build(device), tmp_path / 'states', torch.ones(2, 5, dtype=torch.long, device=device)
    mask[0, :2] = 0
    save(model(mask, mask, use_cache=True).past_key_values, path, model)
    load(path, model)
    tensors = load_file(path)
    with safe_open(path, 'pt') as file:
        about = file.metadata()
    change(tensors, about)
    save_file(tensors, path, metadata=about)
    with pytest.raises(ValueError, match='path must be of a file as save wrote it'):
        load(path, model)


@pytest.mark.parametrize('name', ['paper', 'hybrid', 'window'])
@torch.no_grad()
def test_whose_states_they_are(name, tmp_path, device):
    """Those of the same weights, whatever else their config says; not of others, another dtype or another update."""
    model, path, mask = make(name, device), tmp_path / 'states', torch.ones(2, 5, dtype=torch.long, device=device)
    mask[0, :2] = 0
    cache = model(mask, mask, use_cache=True).past_key_values
    save(cache, path, model)
    model.save_pretrained(tmp_path / 'model')
    same = type(model).from_pretrained(tmp_path / 'model', recompute=False, use_cache=False, eos_token_id=5).to(device)
    got, more = load(path, same), mask.new_ones(2, 1)
    wanted = model(more, torch.cat([mask, more], 1), past_key_values=cache, use_cache=True).logits
    assert torch.equal(same(more, torch.cat([mask, more], 1), past_key_values=got, use_cache=True).logits, wanted)
    exact = build(device, **{**VARIANTS[name], 'exact': True})
    exact.load_state_dict(model.state_dict())
    for other in (exact, make(name, device), same.bfloat16()):
        with pytest.raises(ValueError, match="of this model's weights"):
            load(path, other)
