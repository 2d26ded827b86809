"""Predicted times: loops in PTX whose speed is known, faults that must be named."""

import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from offgpu.launches import Argument, Launch
from offgpu.predict import simulate
from offgpu.predict.integers import HANDLERS
from offgpu.predict.machine import h100
from offgpu.predict.needed import IGNORED, needed, needed_at
from offgpu.predict.runs import Runs, first_touches, walked_tokens
from offgpu.predict.sources import sources_of, touched, touched_by_some
from offgpu.predict.times import Prediction, occupancy, predict_pass
from offgpu.predict.warp import (
    ACCESS,
    BRANCH,
    EVERYTHING,
    HANDLE,
    TENSOR_SPACE,
    Access,
    Layout,
    Trace,
    Warp,
    bank_passes,
    needed_of,
)
from offgpu.sass import Instruction, Program, read_cubin, tool

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


def token_loop(ahead: bool):
    """Loads of a token, then a store that they must not cross; `ahead`: the next token's are on their way before it."""
    init = 'mov.u64 %d1, %d0; add.u64 %d2, %d0, 268435456; ld.volatile.global.f32 %f1, [%d1];'
    load = 'add.u64 %d1, %d1, 4096; ld.volatile.global.f32 %f1, [%d1];'
    use = 'add.f32 %f2, %f1, 0f3F800000;'
    store = 'st.volatile.global.f32 [%d2], %f2; add.u64 %d2, %d2, 4096;'
    body = use + load + store if ahead else load + use + store
    return assemble(init, body * 4, 'st.global.f32 [%d0], %f1;')


@pytest.mark.compiler
def test_a_token_that_waits_for_its_loads_is_named():
    """One warp whose every token waits for DRAM takes DRAM's latency for each, and that is the cause."""
    result = issue(token_loop(ahead=False), 50, level='dram')
    assert h100().dram <= result.cycles / 200 < 1.2 * h100().dram
    # the other three schedulers have no warp
    assert max((n for n in result.share() if n != 'no warp left'), key=result.share().get) == 'wait LDG p DRAM'
    assert result.share()['wait LDG p DRAM'] > 0.2


def copy_loop(store: str):
    """A warp reads four times 512 bytes and sums them; `store` writes as much elsewhere."""
    init = 'mov.u32 %r2, %tid.x; mul.wide.u32 %d1, %r2, 16; add.u64 %d1, %d0, %d1; add.u64 %d2, %d1, 268435456;'
    init += 'cvt.rn.f32.s32 %f4, %r2; mov.f32 %f5, 0f00000000;'
    registers = [[f'%f{8 + 4 * i + j}' for j in range(4)] for i in range(4)]
    body = ''.join(f'ld.volatile.global.v4.f32 {{{",".join(r)}}}, [%d1+{512 * i}];' for i, r in enumerate(registers))
    body += ''.join(store.format(512 * i) for i in range(4)) + ''.join(f'add.f32 %f5, %f5, {x};' for r in registers for x in r)
    return assemble(init, body + 'add.u64 %d1, %d1, 2048; add.u64 %d2, %d2, 2048;', 'st.global.f32 [%d0], %f5;')


@pytest.mark.compiler
def test_what_is_written_waits_in_l2():
    """DRAM reads at its rate, whatever a kernel writes beside it; the bytes that are written count with the kernel's."""
    read = issue(copy_loop(''), 50, warps=8, level='dram', apart=1 << 17)
    store = 'st.volatile.global.v4.f32 [%d2+{}], {{%f4,%f4,%f4,%f4}};'
    both = issue(copy_loop(store), 50, warps=8, level='dram', apart=1 << 17)
    rate = h100().dram_bandwidth / h100().multiprocessors / h100().clock
    assert read.bytes['DRAM read p'] / rate <= read.cycles <= both.cycles < 1.1 * read.cycles
    assert both.bytes['DRAM read p'] == read.bytes['DRAM read p'] == 8 * 50 * 4 * 512
    assert both.bytes['DRAM write p'] - read.bytes['DRAM write p'] == 8 * 50 * 4 * 512


@pytest.mark.parametrize(('lines', 'passes'), [(256, 1), (512, 2)])
@pytest.mark.compiler
def test_what_is_read_again_is_in_l2_while_it_has_room(lines, passes):
    """A warp reads so many times 512 bytes, and then the same again: an SM's part of half of 50 MB is 198 KB."""
    init = f'mov.u32 %r2, %tid.x; mul.wide.u32 %d1, %r2, 16; add.u64 %d1, %d0, %d1; mov.u32 %r3, {lines - 1};'
    body = 'and.b32 %r4, %r1, %r3; mul.wide.u32 %d2, %r4, 512; add.u64 %d2, %d1, %d2;'
    body += 'ld.volatile.global.v4.f32 {%f0,%f1,%f2,%f3}, [%d2]; add.f32 %f4, %f0, %f1;'
    result = issue(assemble(init, body, 'st.global.f32 [%d0], %f4;'), 2 * lines, level='dram')
    assert result.bytes['DRAM read p'] == passes * lines * 512


def test_only_what_addresses_and_branches_need_is_interpreted():
    """With every instruction interpreted, the path and the addresses are the same."""
    program = token_loop(ahead=True)
    kinds = needed_of(program)
    assert 0 < sum(needed(program)) < len(program.code)
    few = trace(program, 5)
    program.kinds = [k if k in (ACCESS, BRANCH) else HANDLE for k in kinds]
    program.kinds = [0 if x.base in IGNORED else k for x, k in zip(program.code, program.kinds, strict=True)]
    every = trace(program, 5)
    assert few.steps == every.steps
    assert [a and (a.tensor, a.first) for a in few.accesses] == [a and (a.tensor, a.first) for a in every.accesses]


def test_other_warps_are_followed_along_a_path():
    """Where they touch memory is what interpreting all of them says; block 2 goes round the loop once less."""
    init = 'mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r4, %r3, 1000, %r2; mul.wide.u32 %d1, %r4, 4;'
    init += 'add.u64 %d1, %d0, %d1; shr.u32 %r5, %r3, 1; mad.lo.u32 %r0, %r5, -1, %r0; mov.u32 %r6, s;'
    body = 'mad.lo.u32 %r6, %r2, 4, %r6; st.volatile.shared.u32 [%r6], %r1;' * 8
    program = assemble(init, body + 'st.volatile.global.u32 [%d1], %r1; add.u64 %d1, %d1, 4096;', '')

    def warp(block: int, w: int) -> Warp:
        return Warp(program, Layout([('p', '*fp32', None), ('n', 'i32', 5)], hidden=0), (block, 0, 0), (4, 1, 1), w, 4)

    path = warp(0, 0).run()
    wanted = {i for i, a in enumerate(path.accesses) if a and a.space == 'global'}
    positions = needed_at(program, path.steps[:max(wanted) + 1], wanted)
    assert len(wanted) == 5 and len(positions) < len(path.steps) / 2
    for block, w in ((0, 3), (1, 0), (1, 2)):
        every = warp(block, w).run().accesses
        assert warp(block, w).sectors(path.steps, positions, wanted) == ({i: every[i].first for i in wanted}, False)
    sectors, left = warp(2, 0).sectors(path.steps, positions, wanted)
    own = {i: a.first for i, a in enumerate(warp(2, 0).run().accesses) if i in wanted and a}
    assert left and own.items() < sectors.items() and set(sectors) == wanted


def test_each_instruction_has_its_own_place():
    """All read a number, then each warp 128 bytes of its block's 4096: neither says where the other lies."""
    init = 'ld.volatile.global.f32 %f0, [%d0]; mov.u32 %r2, %tid.x; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r4, %r3, 1024, %r2;'
    init += 'mul.wide.u32 %d1, %r4, 4; add.u64 %d1, %d0, %d1;'
    program = assemble(init, 'ld.volatile.global.f32 %f1, [%d1]; add.f32 %f0, %f0, %f1;', 'st.global.f32 [%d1], %f0;')
    launch = SimpleNamespace(
        grid=[3, 1, 1], num_warps=4, capability=90, code=lambda: program, other=SimpleNamespace(scalars={}),
        arguments=[SimpleNamespace(name='p', kind='*fp32', value=None), SimpleNamespace(name='n', kind='i32', value=2)],
    )
    runs = Runs(launch)
    blocks = runs.paths(1.0, [0, 2])
    assert runs.notes == []
    for block, i in zip(blocks, (0, 2), strict=True):
        for w, path in enumerate(block):
            own = [a and a.first for a in runs.warp(1.0, i, w).run().accesses]
            shifts = {x: path.shift.get(x, 0) for x in first_touches(path.trace)}
            assert set(shifts.values()) == {0, 128 * i + 4 * w}
            assert all(own[n] == path.trace.accesses[n].first + shifts[x] for x, n in first_touches(path.trace).items())
        assert touched(block)['p'][0] == (17 if i else 16)


def test_blocks_that_have_other_work_take_their_own_path():
    """Even blocks end at once, odd ones read: what is touched is their average, and one path serves all of a kind."""
    init = 'mov.u32 %r2, %ctaid.x; and.b32 %r3, %r2, 1; mul.lo.u32 %r0, %r0, %r3; setp.eq.s32 %q, %r0, 0; @%q ret;'
    init += 'mul.wide.u32 %d1, %r2, 4096; add.u64 %d1, %d0, %d1;'
    program = assemble(init, 'ld.volatile.global.f32 %f0, [%d1]; add.u64 %d1, %d1, 32;', 'st.global.f32 [%d1], %f0;')
    launch = SimpleNamespace(
        grid=[8, 1, 1], num_warps=2, capability=90, code=lambda: program, other=SimpleNamespace(scalars={}),
        arguments=[SimpleNamespace(name='p', kind='*fp32', value=None), SimpleNamespace(name='n', kind='i32', value=3)],
    )
    blocks = Runs(launch).paths(1.0, [0, 1, 2, 3, 5])
    assert len({id(path.trace) for block in blocks for path in block}) == 2
    assert [touched(block).get('p', (0, 0))[0] for block in blocks] == [0, 4, 0, 4, 4]
    assert touched_by_some(blocks) == {'p': 12 / 5}
    assert [set(block[0].shift.values()) for block in (blocks[1], blocks[4])] == [set(), {4 * 128}]


def test_scratch_larger_than_l2_comes_from_dram():
    """In walks shorter than its period, a block seems to touch as much of it as of a tensor that many blocks read."""

    def base(part):
        n, pattern = round(64 * part), np.arange(4)
        reads = [Access('global', False, 1, 'rows', pattern, 4 * i) for i in range(n)]
        writes = [Access('global', True, 1, 'scratch', pattern, 4 * i) for i in range(n)]
        return Trace(steps=[0] * n + [1] * n, accesses=reads + writes)

    machine, size = h100(), 256 * 2**20
    runs = SimpleNamespace(base=base, paths=lambda part, blocks: [[simulate.Path(base(part))] for _ in blocks])
    arguments = [SimpleNamespace(name=name, nbytes=size, storage=i) for i, name in enumerate(('rows', 'scratch'))]
    # the blocks read five times the size of the tensor
    launch = SimpleNamespace(arguments=arguments, blocks=5 * size // (32 * 256))
    source = sources_of(launch, runs, (0.25, 0.5), machine, set(), [0])
    assert source.levels == {'rows': 'l2'}
    assert source.shares == {'scratch': pytest.approx(1 - machine.l2_size * simulate.L2_PART / size)}


def test_tokens_of_a_walk():
    """A slice's own; none where a constant of the kernel grows with the tokens."""
    scalars = {'T': 2048, 'T0': 1536, 'TS': 512, 'H': 1}
    launch = Launch('k', constants={'BS': 16}, arguments=[Argument(n, 'i32', x) for n, x in scalars.items()])
    twice = [Argument(n, 'i32', 2 * x if n[0] == 'T' else x) for n, x in scalars.items()]
    launch.other = Launch('k', constants={'BS': 16}, arguments=twice)
    assert walked_tokens(launch) == 512
    launch.other.constants['BS'] = 32
    assert walked_tokens(launch) is None


@pytest.mark.parametrize('capability', [90, 100])
def test_where_arguments_and_sizes_lie(capability):
    """A loop over n times the blocks, if n is below 9, and an access at the tensor's 32 lanes plus the block's threads."""
    init = 'mov.u32 %r4, %tid.x; shr.u32 %r5, %r4, 8; add.u32 %r5, %r5, 9; min.s32 %r0, %r0, %r5; mov.u32 %r2, %nctaid.y;'
    init += 'mul.lo.u32 %r0, %r0, %r2; mov.u32 %r3, %ntid.x; mul.wide.u32 %d1, %r3, 4; add.u64 %d2, %d0, %d1;'
    init += 'mul.wide.u32 %d1, %r4, 4; add.u64 %d2, %d2, %d1;'
    program = assemble(init, 'st.volatile.global.u32 [%d2], %r1;', '', capability)
    few, many = ([a for a in trace(program, n, 4, capability, (7, 5, 1)).accesses if a] for n in (3, 20))
    assert len(few) == 3 * 5 and len(many) == 9 * 5
    assert {(a.tensor, a.store, a.count, a.first - (1 << TENSOR_SPACE - 5)) for a in few} == {('p', True, 4, 4 * 128 // 32)}


@pytest.mark.parametrize(('a', 'b'), [(0, 4096), (1, 4096), (32, 4096), (33, 4096), (0, 0)])
def test_a_shifted_register_is_subtracted(a, b):
    """LEA of a negated register: its carry is that no borrow is needed, which the upper half of the difference takes."""
    warp = Warp(assemble('', '', ''), Layout([]), (0, 0, 0), (1, 1, 1), 0, 1)
    warp.r[1], warp.r[2] = a, b
    HANDLERS['LEA'](warp, Instruction(0, 0, '', 'LEA', ['R3', 'P0', '-R1', 'R2', '0x7']), EVERYTHING)
    assert (warp.r[3] == (b - (a << 7)) % 2**32).all() and (warp.p[0] == (b >= a << 7)).all()


@pytest.mark.parametrize('capability', [90, 100])
def test_a_wait_for_a_barrier_ends(capability):
    init = 'mov.u32 %r2, s; mbarrier.init.shared.b64 [%r2], 1;'
    body = 'WAIT: mbarrier.try_wait.parity.shared.b64 %q, [%r2], 0; @!%q bra WAIT; st.volatile.global.u32 [%d0], %r1;'
    path = trace(assemble(init, body, '', capability), 3, 1, capability)
    assert sum(a is not None and a.space == 'global' for a in path.accesses) == 3


def test_what_is_not_compiled_takes_its_bytes():
    (p,) = predict_pass([Launch('k', nbytes=28 * 10**9)], h100())
    assert p.seconds == pytest.approx(28e9 / 2.8e12 + 1.5e-6) and p.share == {'copies by PyTorch': 1.0}


def test_of_equal_times_the_one_whose_sms_wait_less():
    """An autotuned kernel's configurations that DRAM bounds alike differ where another length leaves bandwidth over."""
    made = [Prediction('k', seconds, 0, 0, 0, sm_seconds=sm, configuration=name)
            for name, seconds, sm in (('a', 2.0, 1.9), ('b', 2.0, 1.0), ('c', 2.1, 0.5))]
    launches = [SimpleNamespace(choice=i, prediction=p) for i, p in enumerate(made)]
    (best,) = predict_pass(launches, h100(), lambda launch, *_: launch.prediction)
    assert best.configuration == 'b'


@pytest.mark.parametrize(('registers', 'shared', 'warps', 'blocks'), [
    (255, 0, 1, 8), (32, 0, 1, 32), (64, 0, 8, 4), (32, 100_000, 4, 2), (255, 0, 16, 1),
])
def test_occupancy(registers, shared, warps, blocks):
    """65536 registers, 227 KB of shared memory, 64 warps, 32 blocks."""
    launch = SimpleNamespace(shared=shared, num_warps=warps, code=lambda: SimpleNamespace(registers=registers))
    assert occupancy(launch, h100()) == blocks


def test_without_gcc_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setattr(simulate.tempfile, 'gettempdir', lambda: str(tmp_path))
    monkeypatch.setattr(subprocess, 'run', Mock(side_effect=FileNotFoundError))
    with pytest.raises(RuntimeError, match='gcc'):
        simulate.library.__wrapped__()
