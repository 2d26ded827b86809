"""What keeps the exact kernels in the layout of tensor cores is Triton's choice; without a GPU it can be seen here."""

import pytest

from benchmarks.kernels.launches import rehearse
from benchmarks.kernels.run import training_call
from fla_longhorn.ops.triton.exact.mma.lanes import VERSION
from offgpu.calibration.errors import FITTING
from offgpu.launches import rehearsal

# the tiles of 8 tokens that a loop loads and stores; of the forward, Triton 3.8 moves two operands too
TILES = {
    'chunk_longhorn_exact_fwd_kernel_mma': 10, 'chunk_longhorn_exact_bwd_kernel_mma': 12,
    'chunk_longhorn_exact_bwd_kernel_replay_mma': 8, 'chunk_longhorn_exact_bwd_kernel_walk': 20,
}
# with U, which the forward stores and the replay loads
KEPT_TILES = {'chunk_longhorn_exact_fwd_kernel_mma': 13, 'chunk_longhorn_exact_bwd_kernel_replay_mma': 8}
# z and dO of the replay up to 64 entries, whose gradients are computed in the layout of loads; with 128, tiles of theirs
FLOAT_TILES = {('chunk_longhorn_exact_bwd_kernel_replay_mma', K): 6 if K == 128 else 24 for K in (16, 32, 64, 128)}
# loops of more than FITTING instructions by K and gate; that of 64 entries with Triton 3.6 only
LONGER = {
    ('chunk_longhorn_exact_bwd_kernel_replay_mma', 64, 'head'): 785 if VERSION < (3, 7) else FITTING,
    ('chunk_longhorn_exact_bwd_kernel_replay_mma', 128, 'head'): 850,
}


@pytest.mark.parametrize(('K', 'gate', 'kept'), [
    pytest.param(K, gate, kept, marks=() if (K, gate) == (16, None) else pytest.mark.slow)
    for K in (16, 32, 64, 128) for gate in (None, 'head') for kept in (False, True)
])
def test_nothing_moves_between_lanes(K, gate, kept):
    """But tiles on their way from and to memory: each goes through shared memory once."""
    with rehearsal('sm_90', 'code') as launches:
        rehearse(training_call('exact', K, gate, kept))
    found = {launch.kernel: launch.compiled() for launch in launches if launch.kernel in TILES}
    # one walk, or with no solve the general replay
    assert len(found) == (2 if gate is None and (K == 16 or kept and K == 32) else 3)
    tiles = TILES | (KEPT_TILES if kept else {})
    for kernel, compiled in found.items():
        loop = max((x for x in compiled.loops if x.innermost), key=lambda x: x.instructions)
        assert loop.mix['SHFL'] == loop.mix['SEL'] == 0, kernel
        assert loop.mix['LDSM'] + loop.mix['LDS'] <= tiles[kernel] + FLOAT_TILES.get((kernel, K), 0), (kernel, loop.mix)
        assert loop.mix['STSM'] + loop.mix['STS'] <= tiles[kernel] + FLOAT_TILES.get((kernel, K), 0), (kernel, loop.mix)
        assert loop.instructions <= (FITTING if kept else LONGER.get((kernel, K, gate), FITTING)), kernel
