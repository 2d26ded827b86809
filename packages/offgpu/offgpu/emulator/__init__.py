"""Executes launches of Triton kernels on CPU tensors; knows nothing of this project.

    emulator = Emulator('sm_90')            # order='together', 'first' or 'last'
    with emulator.active():                 # launches run here, `torch.empty` gives unwritten memory
        kernel[grid](x, y, o, n, BLOCK=128, num_warps=4)
    for finding in emulator.findings:
        print(finding)                      # kind, kernel, line of the source, PTX instruction, first example

From text to results: `launch` compiles, `parse` reads the PTX, `program` and `instructions` decode it, `machine` runs it.
`memory` is global and shared memory, `formats` number formats, `warp` instructions across lanes; `waits` finds registers that
are used too early, `emulate` copies tensors in and out.
"""

from offgpu.emulator.emulate import Emulator
from offgpu.emulator.launch import Launch
from offgpu.emulator.memory import Finding
from offgpu.emulator.parse import Unsupported

__all__ = ['Emulator', 'Finding', 'Launch', 'Unsupported']
