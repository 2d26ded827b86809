"""What the kernels compile to, without a GPU: every kernel on every target, and forwards without spills."""

import pytest
import torch

from benchmarks.kernels.launches import Call, few_calls, run_call
from benchmarks.kernels.run import launches
from offgpu.absent_device import TARGETS

# every kernel with much else, where all products are float32's, and the largest states that must fit in shared memory
CALLS = [
    *few_calls(), *(Call(exact=exact, V=1536, dtype=torch.float32, D=True, z=True) for exact in (False, True)),
    Call(K=64, V=768), Call(exact=True, K=64, V=768), Call(exact=True, K=128, V=768),
    Call(exact=True, K=128, V=768, dtype=torch.float16),
    Call(exact=True, K=64, V=768, dtype=torch.float16, D=True, z=True, sigmoid=True),
    Call(exact=True, K=256, V=768, dtype=torch.float16),
]


@pytest.mark.slow
@pytest.mark.parametrize('target', TARGETS)
@pytest.mark.parametrize('call', CALLS, ids=str)
def test_every_kernel_compiles(call, target):
    outcome = run_call(call, target, 'code')
    assert outcome.error is None, outcome.error
    assert all(launch['registers'] > 0 for launch in outcome.launches)


@pytest.mark.parametrize(('update', 'K'), [
    ('diagonal', 16), ('exact', 16),
    *(pytest.param(update, K, marks=pytest.mark.slow) for update in ('diagonal', 'exact') for K in (32, 64)),
])
def test_forward_does_not_spill(update, K):
    spills = {name: x.compiled().spills for name, x in launches(update, 'forward', 'sm_90', K).items()}
    assert len(spills) == 2 and not any(spills.values()), spills
