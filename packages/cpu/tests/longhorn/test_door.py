"""`fla_longhorn.patch(packages=...)`: the operators run in Numba while the part is applied, else in PyTorch."""

from tests import forks

PROGRAM = '''
import torch
from fla.models.utils import Cache
import fla_longhorn
from fla_longhorn.ops.backends import select_backend

layer, h = fla_longhorn.Longhorn(hidden_size=16, layer_idx=0), torch.randn(2, 5, 16)

@torch.no_grad()
def decode():
    cache = Cache()
    return torch.cat([layer(h[:, t:t + 1], past_key_values=cache, use_cache=True)[0] for t in range(5)], 1)

found = []
for packages in (True, False, True):
    fla_longhorn.patch(packages=packages)
    found.append((select_backend(h.device).__name__, decode()))
assert [name for name, _ in found] == ['fla_longhorn_cpu.backend', 'fla_longhorn.ops.torch', 'fla_longhorn_cpu.backend']
assert torch.equal(found[0][1], found[2][1])
assert (found[0][1] - found[1][1]).norm() < 1e-6 * found[0][1].norm()
assert not torch.equal(found[0][1], found[1][1])
'''


def test_packages_are_reverted_and_applied_again():
    forks.output('-c', PROGRAM, env={'FLA_LONGHORN_BACKEND': ''})


def test_numba_asked_for_without_the_package():
    code = '''
import pytest, torch, fla_longhorn
fla_longhorn.patch(packages=False)
with pytest.raises(ValueError, match='FLA_LONGHORN_BACKEND=numba needs fla-longhorn-cpu installed'):
    fla_longhorn.chunk_longhorn(*torch.rand(4, 1, 3, 1, 2))
'''
    forks.output('-c', code, env={'FLA_LONGHORN_BACKEND': 'numba'})
