"""Predicted times: loops in PTX whose speed is known, faults that must be named."""

import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from offgpu.launches import Launch
from offgpu.predict import simulate
from offgpu.predict.machine import h100
from offgpu.predict.times import occupancy, predict_pass
from offgpu.predict.warp import (
    Layout,
    Trace,
    Warp,
    bank_passes,
)
from offgpu.sass import Program, read_cubin, tool

HEAD = '''.version VERSION
.target TARGET
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 n) {
.reg .f32 %f<64>; .reg .b32 %r<128>; .reg .b64 %d<8>; .reg .pred %q; .shared .align 16 .b8 s[16384];
ld.param.u64 %d0, [p]; ld.param.u32 %r0, [n];
INIT
mov.u32 %r1, 0;
LOOP:
BODY
add.s32 %r1, %r1, 1; setp.lt.s32 %q, %r1, %r0; @%q bra LOOP;
END
ret;
}'''
# the assembler of each target, and the first version of PTX that knows it
ASSEMBLERS = {90: ('ptxas', '8.0'), 100: ('ptxas-blackwell', '8.6')}


def assemble(init: str, body: str, end: str, capability: int = 90) -> Program:
    """A kernel that runs `body` n times."""
    (name, version), target = ASSEMBLERS[capability], f'sm_{capability}'
    parts = {'VERSION': version, 'TARGET': target, 'INIT': init, 'BODY': body, 'END': end}
    text = HEAD
    for part, value in parts.items():
        text = text.replace(part, value)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, 'k.ptx'), Path(folder, 'k.cubin')
        source.write_text(text)
        subprocess.run([tool(name), f'-arch={target}', '-o', out, source], check=True)
        return read_cubin(out.read_bytes())


def trace(program: Program, n: int, warps: int = 1, capability: int = 90, grid: tuple[int, int, int] = (1, 1, 1)) -> Trace:
    layout = Layout([('p', '*fp32', None), ('n', 'i32', n)], capability, hidden=0)
    run = Warp(program, layout, (0, 0, 0), grid, 0, warps).run()
    assert run.complete and not run.unknown and not run.mixed_branches
    return run


def issue(program: Program, n: int, warps: int = 1, level: str = 'l2', apart: int = 0) -> simulate.Result:
    """On as many warps, of which each touches memory `apart` sectors after the one before."""
    path = trace(program, n, warps)
    block = [simulate.Path(path, dict.fromkeys(path.steps, apart * w)) for w in range(warps)]
    return simulate.simulate(program, h100(), [block], {'*': level}, 1)


def cycles_each(program: Program, count: int, warps: int) -> float:
    """Cycles of a sub-partition for each of an iteration's `count` operations and each of its warps."""
    return (issue(program, 40, warps).cycles - issue(program, 20, warps).cycles) / 20 / count / max(warps / 4, 1)


def chains(operation: str, n: int, repeat: int) -> Program:
    """`n` registers, on each of which `operation` runs `repeat` times an iteration."""
    init = 'mov.u32 %r2, %tid.x;' + ''.join(
        f'cvt.rn.f32.s32 %f{i}, %r2; add.f32 %f{i}, %f{i}, 0f3F80{i:02x}00;' for i in range(n + 2)
    )
    body = ''.join(operation.format(x=f'%f{i}', a=f'%f{n}', b=f'%f{n + 1}') for _ in range(repeat) for i in range(n))
    return assemble(init, body, ''.join(f'st.global.f32 [%d0+{4 * i}], %f{i};' for i in range(n)))


def products(n: int, repeat: int) -> Program:
    """`n` sums of matrix products."""
    init = ''.join(f'ld.global.b32 %r{10 + i}, [%d0+{4 * i}];' for i in range(6))
    init += ''.join(f'cvt.rn.f32.s32 %f{i}, %r0;' for i in range(4 * n))
    one = 'mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c}}}, {{%r10,%r11,%r12,%r13}}, {{%r14,%r15}}, {{{c}}};'
    body = ''.join(one.format(c=','.join(f'%f{4 * i + j}' for j in range(4))) for _ in range(repeat) for i in range(n))
    return assemble(init, body, ''.join(f'st.global.f32 [%d0+{4 * i}], %f{i};' for i in range(4 * n)))


FFMA, EX2 = 'fma.rn.f32 {x}, {x}, {a}, {b};', 'ex2.approx.ftz.f32 {x}, {x};'
SHFL = 'shfl.sync.up.b32 {x}, {x}, 1, 0, -1;'


# cycles that NVIDIA's guide (rates) and the microbenchmarks named in machine.py (latencies) give
@pytest.mark.parametrize(('make', 'count', 'warps', 'least', 'most'), [
    pytest.param(lambda: chains(FFMA, 1, 64), 64, 1, 4, 4.2, id='ffma-latency'),
    pytest.param(lambda: chains(FFMA, 8, 16), 128, 8, 1, 1.1, id='ffma-rate'),
    pytest.param(lambda: chains(EX2, 1, 32), 32, 1, 18, 25, id='ex2-latency'),
    pytest.param(lambda: chains(EX2, 8, 8), 64, 8, 7.9, 8.5, id='ex2-rate'),
    pytest.param(lambda: chains(SHFL, 1, 32), 32, 1, 22, 26, id='shuffle-latency'),
    pytest.param(lambda: chains(SHFL, 8, 8), 64, 8, 3.9, 4.4, id='shuffle-rate'),
    pytest.param(lambda: products(1, 16), 16, 1, 18, 36, id='mma-latency'),
    pytest.param(lambda: products(8, 4), 32, 8, 7.9, 8.5, id='mma-rate'),
])
@pytest.mark.compiler
def test_loops_of_known_speed(make, count, warps, least, most):
    assert least <= cycles_each(make(), count, warps) <= most


# a warp a scheduler: 8 instructions whose line is not in L0 take 32 cycles more than 7, however often the loop has run
@pytest.mark.parametrize(('repeat', 'least', 'most'), [(80, 1, 1.1), (160, 39 / 8, 5)])
@pytest.mark.compiler
def test_loops_longer_than_the_instruction_cache(repeat, least, most):
    program = chains(FFMA, 8, repeat)
    assert least <= cycles_each(program, 8 * repeat, 4) <= most
    share = issue(program, 40, 4).share()
    assert (max(share, key=share.get) == 'fetch') == (repeat > 80)


def shared_loads(stride: int):
    """A lane's word lies `stride` bytes after its neighbour's."""
    init = f'mov.u32 %r2, %tid.x; mov.u32 %r3, s; mad.lo.u32 %r4, %r2, {stride}, %r3; mov.f32 %f0, 0f00000000;'
    body = ''.join(f'ld.volatile.shared.f32 %f{1 + i}, [%r4];' for i in range(8))
    body += ''.join(f'add.f32 %f0, %f0, %f{1 + i};' for i in range(8))
    return assemble(init, body, 'st.global.f32 [%d0], %f0;')


@pytest.mark.compiler
def test_bank_conflicts_are_named():
    """With a stride of 32 bytes, lanes meet in four banks: eight turns for each load."""
    conflict, free = shared_loads(32), shared_loads(4)
    assert {a.passes for a in trace(conflict, 4).accesses if a and a.space == 'shared'} == {8}
    assert {a.passes for a in trace(free, 4).accesses if a and a.space == 'shared'} == {1}
    slow, fast = issue(conflict, 100, warps=8), issue(free, 100, warps=8)
    assert max(slow.share(), key=slow.share().get) == 'wait LDS'
    # eight warps' eight loads of eight turns an iteration, on one data path
    assert 8 * 8 * 8 * 100 <= slow.cycles < 1.1 * 8 * 8 * 8 * 100
    assert slow.cycles > 1.8 * fast.cycles


@pytest.mark.parametrize(('addresses', 'size', 'passes'), [
    ([4 * i for i in range(32)], 4, 1), ([0] * 32, 4, 1), ([256 * i for i in range(32)], 4, 32),
    ([16 * i for i in range(32)], 16, 4), ([8 * i for i in range(32)], 8, 2), ([4 * (i // 2) for i in range(32)], 2, 1),
])
def test_turns_of_shared_memory(addresses, size, passes):
    assert bank_passes(addresses, size) == passes


def test_what_is_not_compiled_takes_its_bytes():
    (p,) = predict_pass([Launch('k', nbytes=28 * 10**9)], h100())
    assert p.seconds == pytest.approx(28e9 / 2.8e12 + 1.5e-6) and p.share == {'copies by PyTorch': 1.0}


@pytest.mark.parametrize(('registers', 'shared', 'warps', 'blocks'), [
    (255, 0, 1, 8), (32, 0, 1, 32), (64, 0, 8, 4), (32, 100_000, 4, 2), (255, 0, 16, 1),
])
def test_occupancy(registers, shared, warps, blocks):
    """65536 registers, 227 KB of shared memory, 64 warps, 32 blocks."""
    launch = SimpleNamespace(shared=shared, num_warps=warps, code=lambda: SimpleNamespace(registers=registers))
    assert occupancy(launch, h100()) == blocks
