"""A decoded token reads nothing on the host: the recipe of docs/generate.md for CUDA graphs, on a GPU or the pretend one."""

import pytest
import torch

from tests.models.test_cache import build
from tests.pages import DOCS, blocks

RECIPE = next(x for x in blocks(DOCS / 'generate.md', 'python') if 'CUDAGraph' in x)


@pytest.mark.parametrize('padded', [False, True], ids=['', 'mask'])
@pytest.mark.parametrize('options', [
    {}, {'exact': True, 'num_heads': 2}, {'gate': 'head', 'num_heads': 2}, {'exact': True, 'gate': 'channel'},
], ids=['diagonal', 'exact', 'gate', 'exact-gate'])
@torch.no_grad()
def test_replayed_steps(options, padded, device):
    if device.type == 'cpu':
        pytest.skip('a CUDA graph is for a GPU: make test-device')
    names = {'torch': torch}
    exec(RECIPE, names)
    model = build(device, **options).eval()
    ids = torch.randint(3, 53, (2, 9), device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    expected = model(ids, attention_mask=mask).logits[:, 5:]
    cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
    step = names['make_step'](model, cache, mask[:, :6] if padded else None)
    got = torch.cat([step(ids[:, t:t + 1]).clone() for t in range(5, 9)], 1)
    assert (got - expected).norm() < 1e-5 * expected.norm()
