"""A token of a batch-invariant model takes the kernels of a sequence, and the grids of those that are not autotuned.

In the interpreter kernels for a token and for a sequence may have the same bits; compiled, they fuse and sum in other orders.
"""

import pytest
import torch

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn_extras.batch_invariant import make_batch_invariant
from offgpu.pretend import counted

# one program has several tokens, each with sums of its own
BY_TOKENS = {'longhorn_prepare_kernel'}


@pytest.mark.usefixtures('kernels')
@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
@torch.no_grad()
def test_same_launches(exact):
    config = LonghornConfig(hidden_size=64, num_hidden_layers=1, vocab_size=97, num_heads=2, k_norm='l2', exact=exact)
    model = make_batch_invariant(LonghornForCausalLM(config).eval().cuda())
    ids, seen = torch.randint(3, 97, (2, 71), device='cuda'), []
    cache = None
    for part in ids.split([70, 1], 1):
        with counted() as counts:
            cache = model(part, past_key_values=cache, use_cache=True).past_key_values
        assert counts.launches.total() >= 4
        seen.append({(name, None if name in BY_TOKENS else grid) for name, grid in counts.grids})
    assert seen[0] == seen[1]
