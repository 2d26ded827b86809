"""Small loops in PTX, assembled and put through the timing model."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from offgpu.predict.machine import h100
from offgpu.predict.simulate import Path as WarpPath
from offgpu.predict.simulate import Result, simulate
from offgpu.predict.warp import Layout, Trace, Warp
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
    path = Warp(program, layout, (0, 0, 0), grid, 0, warps).run()
    assert path.complete and not path.unknown and not path.mixed_branches
    return path


def issue(program: Program, n: int, warps: int = 1, level: str = 'l2', apart: int = 0) -> Result:
    """On as many warps, of which each touches memory `apart` sectors after the one before."""
    path = trace(program, n, warps)
    block = [WarpPath(path, dict.fromkeys(path.steps, apart * w)) for w in range(warps)]
    return simulate(program, h100(), [block], {'*': level}, 1)


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
