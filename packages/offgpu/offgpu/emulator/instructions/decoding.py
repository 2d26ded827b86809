"""The table of decoders, and shared helpers.

A decoder gets the program, the instruction and its modifiers (`('rn', 'f32')` of `fma.rn.f32`), and returns a function that
works on all lanes under the machine's mask, or None for a no-op. It raises an error for anything that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from offgpu.emulator import formats
from offgpu.emulator.formats import HALF
from offgpu.emulator.memory import SHARED_BASE
from offgpu.emulator.parse import Address, Instruction, Unsupported, Vector

if TYPE_CHECKING:
    from offgpu.emulator.program import Program

DECODERS: dict[str, Callable] = {}



def decoder(*names: str):
    """Register the decorated decoder for these opcodes."""
    def register(function):
        for name in names:
            DECODERS[name] = function
        return function
    return register


def elementwise(program: Program, x: Instruction, kinds: list[str], function: Callable) -> Callable:
    """Write `function` of the sources, read as `kinds`, to the first operand."""
    destination = program.register(x.operands[0])
    sources = [program.source(operand, kind) for operand, kind in zip(x.operands[1:], kinds, strict=True)]
    return lambda m: m.put(destination, function(*[source(m.registers) for source in sources]))


def with_flush(function: Callable, modifiers: tuple[str, ...]) -> Callable:
    if 'ftz' not in modifiers:
        return function
    return lambda *x: formats.flushed(function(*map(formats.flushed, x)))


def halved(function: Callable, kind: str) -> Callable:
    """A function of float32 for operands of one or two 16-bit floats."""
    load, store = HALF[kind.removesuffix('x2')]
    if not kind.endswith('x2'):
        return lambda *x: store(function(*map(load, x)))
    return lambda *x: formats.pack(
        store(function(*(load(formats.low(y)) for y in x))), store(function(*(load(formats.high(y)) for y in x))),
    )


def numbers_of(program: Program, operand) -> list[int]:
    """The registers that an operand names: a vector's, or the one."""
    return [program.register(y) for y in (operand.items if isinstance(operand, Vector) else (operand,))]


def sources_of(program: Program, operand, kind: str) -> list[Callable]:
    """A source for each item of a vector, or for the one operand."""
    return [program.source(y, kind) for y in (operand.items if isinstance(operand, Vector) else (operand,))]


def memory_type(x: Instruction) -> tuple[int, str]:
    """(elements, type) of a load or store."""
    count = next((int(y[1:]) for y in x.opcode if y in ('v2', 'v4', 'v8')), 1)
    return count, x.opcode[-1]


def address_of(program: Program, operand: Address) -> Callable:
    """A function that gives the addresses of lanes, int64."""
    offset = operand.offset
    if isinstance(operand.base, str):
        if operand.base != 'global_smem':
            raise Unsupported(f'symbol {operand.base}')
        constant = np.int64(SHARED_BASE + offset)
        return lambda m, lanes: np.full(len(lanes), constant)
    kind = 'u32' if program.bits[program.register(operand.base)] == 32 else 'u64'
    base = program.source(operand.base, kind)
    shift = np.int64(offset)
    return lambda m, lanes: base(m.registers)[lanes].astype(np.int64) + shift


def note_granule(program: Program, space: str, width: int) -> None:
    """The narrowest access to a space, the granularity of its shadow."""
    program.granules[space] = min(program.granules[space], width)
