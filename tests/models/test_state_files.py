"""Caches in files: going on from one is bit-equal to not having stopped, and what does not belong is refused."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fla_longhorn.attn_mode import FAMILIES
from fla_longhorn.modules.rewind import RewindableCache
from tests.models.test_cache import VARIANTS, build, contents, equal, make

T = 20


def read(model, ids, cache, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)


def prompt(device, rows=2):
    return torch.randint(3, 50, (rows, T), device=device)


@pytest.mark.parametrize('padding', [False, True], ids=['', 'padding'])
@pytest.mark.parametrize('name', [*VARIANTS, 'gla hybrid', *FAMILIES])
def test_goes_on(name, padding, device, tmp_path):
    model, ids = make(name, device), prompt(device)
    mask = torch.ones_like(ids)
    if padding:
        mask[0, :3] = mask[1, 6:9] = 0
    cache = read(model, ids[:, :12], None, mask[:, :12]).past_key_values
    cache.save(tmp_path / 'states', model, weights=True)
    assert [path.name for path in tmp_path.iterdir()] == ['states']
    again = RewindableCache.load(tmp_path / 'states', model)
    equal(contents(again), contents(cache))
    for at in (slice(12, 17), slice(17, 18)):
        want, got = (read(model, ids[:, at], x, mask[:, :at.stop]).logits for x in (cache, again))
        assert torch.equal(want, got)


def test_rows_selected_and_repeated(device, tmp_path):
    model, ids = make('hybrid', device), prompt(device, 3)
    read(model, ids[:, :12], None).past_key_values.save(tmp_path / 'states', model)
    cache = RewindableCache.load(tmp_path / 'states', model)
    cache.batch_select_indices(torch.tensor([2], device=device))
    cache.batch_repeat_interleave(2)
    alone = read(model, ids[2:, :12], None).past_key_values
    want = read(model, ids[2:, 12:], alone).logits
    got = read(model, ids[2:, 12:].expand(2, -1), cache).logits
    assert (got - want).norm() <= 1e-5 * got.norm()


def test_in_another_process(tmp_path):
    model, ids = make('paper', torch.device('cpu')), prompt('cpu')
    model.save_pretrained(tmp_path / 'model')
    cache = read(model, ids, None).past_key_values
    cache.save(tmp_path / 'states', model, weights=True)
    program = (
        'import sys, torch; from fla_longhorn import LonghornModel; from fla_longhorn.modules.rewind import RewindableCache\n'
        'model = LonghornModel.from_pretrained(sys.argv[1]).eval(); cache = RewindableCache.load(sys.argv[2], model)\n'
        'print(cache.get_seq_length())'
    )
    done = subprocess.run(
        [sys.executable, '-c', program, tmp_path / 'model', tmp_path / 'states'], capture_output=True, text=True,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == str(T), done.stderr


def test_refused(device, tmp_path):
    path = tmp_path / 'states'
    model = make('paper', device)
    read(model, prompt(device), None).past_key_values.save(path, model, weights=True)
    with pytest.raises(ValueError, match="this model's config"):
        RewindableCache.load(path, make('exact, mlp', device))
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="this model's weights"):
        RewindableCache.load(path, build(device, **VARIANTS['paper']))
    with pytest.raises(FileNotFoundError):
        RewindableCache.load(tmp_path / 'none', model)

    whole = path.read_bytes()
    for n in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match='path must be of a whole safetensors file'):
            RewindableCache.load(path, model)
    for at in (-1, len(whole) // 2):
        edited = bytearray(whole)
        edited[at] ^= 1
        path.write_bytes(edited)
        with pytest.raises(ValueError, match='whose states were changed'):
            RewindableCache.load(path, model)
    save_file({'x': torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r'RewindableCache\.save wrote'):
        RewindableCache.load(path, model)


def test_dtypes(device, tmp_path):
    model = make('hybrid', device).bfloat16()
    cache = read(model, prompt(device), None).past_key_values
    cache.save(tmp_path / 'states', model)
    with safe_open(tmp_path / 'states', 'pt') as file:
        assert file.metadata()['format'].startswith('fla-longhorn states')
    assert {x.dtype for x in load_file(tmp_path / 'states').values()} == {torch.float32, torch.bfloat16}
    equal(contents(RewindableCache.load(tmp_path / 'states', model)), contents(cache))


def test_a_full_disk_keeps_the_old_file(device, tmp_path, monkeypatch):
    path = tmp_path / 'states'
    model, ids = make('paper', device), prompt(device)
    cache = read(model, ids, None).past_key_values
    cache.save(path, model)
    old = path.read_bytes()

    def fail(tensors, file, metadata):
        file.write_bytes(b'half')
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('fla_longhorn.modules.state_files.save_file', fail)
    with pytest.raises(OSError, match='No space'):
        read(model, ids, cache).past_key_values.save(path, model)
    assert path.read_bytes() == old and [x.name for x in tmp_path.iterdir()] == ['states']
