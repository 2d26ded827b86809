"""The operators as a package of the library `kernels`: nothing of fla or this package in it, the same results beside it."""

import pytest

from tests import forks

PROGRAM = '''
import sys
from pathlib import Path

import kernels
import torch

OTHERS = ('fla', 'fla_cpu', 'fla_kit', 'fla_longhorn', 'transformers')


def results(ops, beta_shape, exact):
    torch.manual_seed(0)
    q, k, v, z = (torch.randn(2, 70, 2, size, requires_grad=True) for size in (16, 16, 24, 24))
    beta, D = torch.randn(beta_shape, requires_grad=True), torch.randn(2, 24, requires_grad=True)
    options = dict(exact=exact, use_beta_sigmoid_in_kernel=True)
    o, state = ops.chunk_longhorn(q, k, v, beta, D=D, z=z, output_final_state=True, **options)
    gradients = torch.autograd.grad((o * o.detach()).sum() + state.square().sum(), (q, k, v, beta, D, z))
    state = state.detach().clone()
    with torch.no_grad():
        step = ops.longhorn_state_update(state, *(x[:, :1] for x in (q, k, v, beta)), **options)
    return o, *gradients, step, state


calls = [(shape, exact) for shape in ((2, 70, 2, 24), (2, 70, 2)) for exact in (False, True)]
sys.modules.update(dict.fromkeys(OTHERS))
kernel = kernels.get_local_kernel(Path(sys.argv[1]), backend='cpu')
mine = [results(kernel, *call) for call in calls]
assert not any(sys.modules[name] for name in OTHERS)
for name in OTHERS:
    del sys.modules[name]
from fla_longhorn import ops
assert all(torch.equal(a, b) for got, call in zip(mine, calls) for a, b in zip(got, results(ops, *call), strict=True))
assert all(x.isfinite().all() and x.any() for got in mine for x in got)
print(kernel.__name__)
'''


@pytest.mark.parametrize('interpret', ['0', '1'])
def test_equals_the_package(tmp_path, interpret):
    pytest.importorskip('kernels', reason='make test-serving has kernels')
    assert forks.output('-m', 'fla_longhorn.contrib.kernels', tmp_path, fla=False) == ''
    out = forks.output('-c', PROGRAM, tmp_path, fla=False, env={'TRITON_INTERPRET': interpret})
    assert out.split('\n')[-2].startswith('_fla_longhorn_cpu_')
