"""A kernel decoded: straight blocks of operations, and registers by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from offgpu.emulator.formats import TYPES, UNSIGNED
from offgpu.emulator.instructions import decode
from offgpu.emulator.memory import SHARED_BASE
from offgpu.emulator.parse import Immediate, Instruction, Kernel, Register, Unsupported, float_of
from offgpu.emulator.waits import early_uses


class Block:
    """Straight code: operations as (function, guard register or None, negated), and what ends it."""

    def __init__(self, first: int) -> None:
        self.first, self.next = first, first + 1
        self.operations: list[tuple[Callable, int | None, bool]] = []
        self.end: Instruction | None = None


class Program:
    """A kernel decoded: blocks of code, and registers by number."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        # the number of a register, and the width of each in bits
        self.numbers: dict[str, int] = {}
        self.bits: list[int] = []
        ins = kernel.instructions
        leaders = {0, *kernel.labels.values()}
        leaders |= {i + 1 for i, x in enumerate(ins) if x.opcode[0] in ENDS or is_barrier(x)}
        starts = sorted(x for x in leaders if x < len(ins))
        index = {start: i for i, start in enumerate(starts)}
        # a label after the last instruction is the end of the program
        self.exit = len(starts)
        self.targets = {name: index.get(at, self.exit) for name, at in kernel.labels.items()}
        self.granules = {'global': 8, 'shared': 8}
        self.blocks = []
        self.uses_groups = any(x.opcode[0] == 'wgmma' for x in ins)
        self.early_uses = list(early_uses(kernel))
        for i, (start, stop) in enumerate(zip(starts, [*starts[1:], len(ins)], strict=True)):
            block = Block(start)
            block.next = i + 1
            for instruction in ins[start:stop]:
                if instruction.opcode[0] in ENDS or is_barrier(instruction):
                    block.end = instruction
                    if instruction.guard is not None:
                        self.register(instruction.guard)
                    break
                guard = None if instruction.guard is None else self.register(instruction.guard)
                try:
                    operation = decode(self, instruction)
                except Unsupported:
                    raise
                except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                    raise Unsupported(f'{instruction.text} ({type(error).__name__}: {error})') from error
                if operation is not None:
                    block.operations.append((operation, guard, instruction.negated))
            self.blocks.append(block)

    def register(self, x: Register) -> int:
        """A register's number."""
        if x.name not in self.numbers:
            prefix = x.name.rstrip('0123456789')
            if prefix not in self.kernel.widths:
                raise Unsupported(f'register {x.name}')
            self.numbers[x.name] = len(self.bits)
            self.bits.append(self.kernel.widths[prefix])
        return self.numbers[x.name]

    def source(self, x, kind: str) -> Callable:
        """A function of the registers that gives operand `x` as an array, or a scalar, of `kind`."""
        dtype = TYPES[kind]
        if isinstance(x, Immediate):
            value: Any
            if dtype is np.bool_:
                value = np.bool_(x.value != 0)
            elif kind == 'f32' and x.kind == 'i' or kind == 'f64':
                value = dtype(float_of(x))
            else:
                bits = np.dtype(dtype).itemsize * 8
                value = np.array(x.value & ((1 << bits) - 1), UNSIGNED[bits]).view(dtype)[()]
            return lambda registers: value
        if isinstance(x, str):
            # the only symbol that Triton's code has
            if x != 'global_smem' and not x.startswith('__local_depot'):
                raise Unsupported(f'symbol {x}')
            value = dtype(SHARED_BASE if x == 'global_smem' else 0)
            return lambda registers: value
        if x.name.split('.')[0] in ('%tid', '%ntid', '%ctaid', '%nctaid', '%laneid', '%warpid'):
            name = x.name
            return lambda registers: registers.special[name].view(dtype)
        number = self.register(x)
        width, wanted = self.bits[number], 1 if dtype is np.bool_ else np.dtype(dtype).itemsize * 8
        if width == wanted:
            return lambda registers: registers[number].view(dtype)
        if width > wanted:
            unsigned = UNSIGNED[wanted]
            return lambda registers: registers[number].astype(unsigned).view(dtype)
        raise Unsupported(f'{x.name} of {width} bits as {kind}')


ENDS = {'bra', 'ret', 'exit', 'trap'}


def is_barrier(x: Instruction) -> bool:
    return x.opcode[0] in ('bar', 'barrier') and 'warp' not in x.opcode


class Registers(list):
    """Registers by number, and the special ones by name."""

    special: dict
