"""`python -m benchmarks predict`: floors by hand, what it takes from the wrappers, what it writes, and what it refuses."""

import json

import pytest

from benchmarks.predict.calls import Shape
from benchmarks.predict.floors import floor_of, needed_bytes, scan_instructions
from benchmarks.predict.run import machine_of, main
from offgpu.predict.machine import h100
from tests import forks


def test_floors_by_hand():
    """B=8, T=2048, V=4096, K=16, as the layer calls it: states every 128 tokens."""
    s, machine = Shape(8, 2048, 4096, 16), h100()
    # v, beta, z, o; k, q of 16 entries each for 4096 channels; 16 float32 in 128 tokens
    assert needed_bytes(s, 'fwd') == 4 * 2 + 2 * 16 * 2 / 4096 + 16 * 4 / 128 == 8.515625
    # v, beta, z, do, dv, dbeta, dz; q, k, dq, dk; the states again
    assert needed_bytes(s, 'bwd') == 7 * 2 + 4 * 16 * 2 / 4096 + 16 * 4 / 128 == 14.53125
    assert needed_bytes(s, 'fwd', plain=True) == needed_bytes(s, 'fwd') - 2
    floor = floor_of('diagonal_fwd', s, machine)
    work = 8 * 2048 * 4096
    assert floor.dram_seconds == pytest.approx(work * 8.515625 / 3.0e12)
    assert floor.issue_seconds == pytest.approx(work * (4 * 16 + 17.5) / (132 * 128 * 1.755e9))
    assert floor.seconds == floor.dram_seconds
    # nine products of the state and five of Gram matrices at 2048 FMA a clock outweigh 49 instructions at 128 lanes
    exact = floor_of('exact_bwd', Shape(8, 2048, 4096, 128), machine)
    assert exact.issue_seconds == pytest.approx(work * (9 * 128 + 80) / 2048 / (132 * 1.755e9))
    # forward 9 instructions of each of 16 entries and 20 others, back 27 and 38; exponentials bound no direction
    assert [scan_instructions(direction, 16) for direction in ('fwd', 'bwd')] == [164, 470]


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match="gpu must be one of .*, got B300: no others' constants"):
        machine_of('B300', [])
    with pytest.raises(ValueError, match='pass must be one of .* for B200, whose latencies are not known, got chunk_kda_bwd'):
        main(['--gpu', 'B200', '--pass', 'chunk_kda_bwd'])
    with pytest.raises(ValueError, match='set takes a number .* got speed=1'):
        machine_of('H100', ['speed=1'])
    assert machine_of('H100', ['dram=700', 'l2_bytes_per_clock=20']).dram == 700
    with pytest.raises(SystemExit):
        main(['--shape', '8,2048'])


LAUNCHES = """
from benchmarks.kernels.launches import Call, run_call
from benchmarks.predict.calls import PASSES, Shape
from offgpu.predict.capture import capture

# the last one's diagonal passes are split along the sequence if they are twice as long
for B, T, V, K in (8, 2048, 4096, 16), (1, 131072, 4096, 16), (1, 200, 1024, 16):
    for update in ('diagonal', 'exact'):
        passes = []
        for name in (f'{update}_fwd', f'{update}_bwd'):
            found = capture(PASSES[name](Shape(B, T, V, K), False), T, 'sm_90', 'launch')
            passes += [(x.kernel, list(x.grid)) for x in found if not x.kernel.startswith('torch.')]
        call = Call(exact=update == 'exact', B=B, T=T, V=V, K=K, layout='view', sigmoid=True, D=True, z=True)
        outcome = run_call(call, 'sm_90', 'launch')
        assert outcome.error is None, outcome.error
        assert passes and passes == [(x['kernel'], list(x['grid'])) for x in outcome.launches], (update, B, T)
"""


def test_launches_are_those_that_the_wrappers_make():
    forks.output('-c', LAUNCHES)


SCALAR = """
from benchmarks.predict.calls import SCALAR, Shape
from offgpu.predict.capture import capture

gla = {'fwd': 'chunk_gla_fwd_kernel_o', 'bwd': 'chunk_gla_bwd_kernel_inter'}
gate = {'fwd': 'torch.silu', 'bwd': 'torch.silu_backward'}
for name, make in SCALAR.items():
    for plain in (False, True):
        launches = capture(make(Shape(1, 512, 256, 32), plain), 512, 'sm_90', 'launch')
        found = {x.kernel for x in launches}
        own, direction = name.startswith('diagonal'), name[-3:]
        of_longhorn = {x for x in found if 'longhorn' in x}
        assert of_longhorn == ({x for x in found if not x.startswith('torch.')} if own else set()), (name, found)
        assert (gla[direction] in found, gate[direction] in found) == (not own, not own and not plain), (name, plain, found)
        assert f'longhorn_{direction}_kernel' in found or not own, (name, found)
        assert {a.nbytes for x in launches for a in x.arguments if a.name == 'beta'} == ({2 * 512} if own else set())
        # a pass has the kernels of its direction alone
        assert not found & {gla['fwd' if direction == 'bwd' else 'bwd']}
"""


def test_one_step_size_per_head_has_two_routes():
    """Longhorn's kernels alone, or fla's with PyTorch's around them, without a gate if plain."""
    forks.output('-c', SCALAR)


SCAN = """
import torch
from benchmarks.predict.mamba import Scan, convolution_bwd, convolution_fwd
from offgpu.launches import rehearsal, spread

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device='meta')

B, D, T, N, f32 = 2, 64, 4097, 16, torch.float32
u, delta, z, dout = (empty(B, D, T) for _ in range(4))
A, bias, skip, b = empty(D, N, dtype=f32), empty(D, dtype=f32), empty(D, dtype=f32), empty(B, 1, N, T)
with rehearsal('sm_90', 'launch', spread(1)) as launches:
    out, states, gated = Scan.fwd(u, delta, A, b, b, skip, z, bias, True)
    assert states.shape == (B, D, 3, 2 * N) and out.shape == gated.shape == u.shape
    du, ddelta, dA, dB, dC, dD, dbias, dz, again = Scan.bwd(
        u, delta, A, b, b, skip, z, bias, dout, states, out, None, True, True,
    )
    for x, y in (du, u), (ddelta, delta), (dA, A), (dB, b), (dC, b), (dD, skip), (dbias, bias), (dz, z), (again, out):
        assert x.shape == y.shape and x.dtype == y.dtype
    of_channels, of_entries, vectors, saved = 2 * B * D * T, 2 * B * N * T, 4 * D * (N + 2), 4 * B * D * 3 * 2 * N
    forward, backward = launches
    assert forward.nbytes == 5 * of_channels + 2 * of_entries + vectors + saved
    # the sums over channels are float32
    assert backward.nbytes == 9 * of_channels + 2 * of_entries + 2 * 2 * of_entries + 2 * vectors + saved
    assert (forward.issued, backward.issued) == (B * D * T * 164 / 32, B * D * T * 470 / 32)
    launches.clear()

    # fla's convolution reads channels that lie side by side; a gradient is written to the tensor that is given
    side = empty(B, T, D + 8)[..., :D].transpose(1, 2)
    for x in u, side:
        y = convolution_fwd(x, empty(D, 4), None, None, None, None, True)
        dx = torch.empty_like(x)
        result, dw, db, _ = convolution_bwd(x, empty(D, 4), empty(D), y, None, None, None, dx, False, True)
        assert y.shape == x.shape and y.stride(1 if x is side else 2) == 1
        assert result is dx and dw.shape == (D, 4) and db.shape == (D,)
    kernels = [launch.kernel for launch in launches]
    assert kernels == 2 * ['causal_conv1d_fwd_kernel', 'causal_conv1d_fwd_kernel', 'causal_conv1d_bwd_kernel'], kernels
    strides = [launch.constants.get('stride_x_d', launch.scalars.get('stride_x_d')) for launch in launches]
    assert strides == 6 * [1], strides
"""


def test_what_stands_in_for_mambas_cuda_kernels():
    """What they return, and what is counted of them: each tensor once, by hand."""
    forks.output('-c', SCAN)


def test_mamba_is_left_out_without_its_package(tmp_path):
    file = tmp_path / 'layers.json'
    text = forks.output('-m', 'benchmarks', 'layers', '--layer', 'Mamba', 'Mamba-2', '--json', str(file))
    assert text.startswith('Mamba and Mamba-2: left out, there is no mamba_ssm') and not file.exists()


@pytest.mark.slow
def test_the_command(tmp_path):
    """A row that the file holds of this commit is not made again."""
    file = tmp_path / 'predicted.json'
    shape = ('--pass', 'exact_fwd', '--K', '16', '--shape', '1,2048,1024')
    command = ('-m', 'benchmarks', 'predict', *shape, '--json', str(file))
    text = forks.output(*command)
    report = json.loads(file.read_text())
    (row,) = report['rows']
    assert text.startswith(f'H100 exact_fwd B=1 T=2048 V=1024 K=16: {row["ms"]:.3f} ms')
    assert row['ms'] == pytest.approx(sum(k['ms'] for k in row['kernels']), abs=1e-3)
    assert row['ratio'] == pytest.approx(row['ms'] / max(row['dram_floor_ms'], row['issue_floor_ms']), rel=0.02)
    assert row['bytes'] > row['bytes_needed']
    assert forks.output(*command) == '' and json.loads(file.read_text())['rows'] == [row]
