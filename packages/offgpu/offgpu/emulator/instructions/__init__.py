"""The instructions: one module per kind, and the table that finds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from offgpu.emulator.instructions import arithmetic, bits, copies, loads, products, values, warps  # noqa: F401  enter their decoders
from offgpu.emulator.instructions.decoding import DECODERS
from offgpu.emulator.parse import Instruction, Unsupported

if TYPE_CHECKING:
    from offgpu.emulator.program import Program


def decode(program: Program, x: Instruction) -> Callable | None:
    """A function of the machine that runs `x`, or None if there is nothing to do; raises `Unsupported`."""
    if x.opcode[0] not in DECODERS:
        raise Unsupported(x.text)
    return DECODERS[x.opcode[0]](program, x, x.opcode[1:])
