"""What the kernels compile to, without a GPU: every kernel on every target, loops that fit the instruction cache."""

import pytest
import torch

from benchmarks.kernels.launches import Call, few_calls, run_call
from benchmarks.kernels.run import training_call
from offgpu.absent_device import TARGETS
from offgpu.calibration.errors import FITTING

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


# innermost loops of more than FITTING instructions by K and gate, or 'kept': on sm_90, on others; spills on sm_90; no card has
# timed them
LONGER = {
    ('longhorn_bwd_kernel', 16): (FITTING, 785, 0),
    ('longhorn_bwd_kernel', 32): (770, 779, 0),
    ('longhorn_bwd_kernel', 64): (770, 783, 0),
    ('longhorn_bwd_kernel', 128): (770, 783, 0),
    ('chunk_longhorn_exact_bwd_kernel_replay_mma', 16, 'head'): (FITTING, FITTING, 36),
    ('chunk_longhorn_exact_bwd_kernel_replay', 16, 'channel'): (887, 955, 0),
    ('chunk_longhorn_exact_bwd_kernel', 16, 'channel'): (843, 854, 0),
    ('chunk_longhorn_exact_bwd_kernel_replay_mma', 32): (FITTING, FITTING, 9),
    ('chunk_longhorn_exact_bwd_kernel_mma', 64): (FITTING, FITTING, 2),
    ('chunk_longhorn_exact_bwd_kernel_replay_mma', 64): (FITTING, FITTING, 65),
    ('chunk_longhorn_exact_bwd_kernel_replay_mma', 128): (FITTING, 870, 0),
    ('chunk_longhorn_exact_bwd_kernel_walk', 16, 'kept'): (FITTING, 803, 3),
    ('chunk_longhorn_exact_bwd_kernel_walk', 32, 'kept'): (FITTING, 904, 74),
    ('chunk_longhorn_exact_bwd_kernel_replay_mma', 64, 'kept'): (FITTING, FITTING, 13),
    ('chunk_longhorn_exact_bwd_kernel_mma', 64, 'kept'): (FITTING, FITTING, 2),
}


@pytest.mark.parametrize(('target', 'update', 'K', 'gate'), [
    pytest.param(target, update, K, *gate, marks=() if (target, K) == ('sm_90', 16) else pytest.mark.slow)
    for target in ('sm_90', 'sm_80', 'sm_100', 'sm_120') for update in ('diagonal', 'exact')
    for K, *gate in ((16, None), (16, 'head'), (16, 'channel'), (32, None), (64, None), (128, None))
] + [
    pytest.param(target, 'exact', K, 'kept', marks=() if (target, K) == ('sm_90', 16) else pytest.mark.slow)
    for target in ('sm_90', 'sm_80', 'sm_100', 'sm_120') for K in (16, 32, 64, 128)
])
def test_hot_loops_fit_the_instruction_cache(target, update, K, gate):
    """And on sm_90 neither the exact kernels spill, but for what is named, nor the diagonal forward at up to 64 entries."""
    outcome = run_call(training_call(update, K, None if gate == 'kept' else gate, gate == 'kept'), target, 'code')
    assert outcome.error is None, outcome.error
    case = (K, gate) if gate else (K,)
    longer = {name: LONGER.get((name, *case), (FITTING, FITTING, 0)) for name in (x['kernel'] for x in outcome.launches)}
    loops = {x['kernel']: max(x['loops'], default=0) for x in outcome.launches}
    assert {name: n for name, n in loops.items() if n > longer[name][target != 'sm_90']} == {}
    spills = {x['kernel']: x['spills'] for x in outcome.launches if update == 'exact' or K <= 64 and 'bwd' not in x['kernel']}
    assert target != 'sm_90' or {name: n for name, n in spills.items() if n > longer[name][2]} == {}
