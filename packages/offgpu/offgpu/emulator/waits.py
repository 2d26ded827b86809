"""Finds registers of a `wgmma` that are used before its wait: until then the product may still read or write them."""

from __future__ import annotations

from collections.abc import Iterator

from offgpu.emulator.parse import Address, Instruction, Kernel, Register, Vector

# their first operand is read
NO_RESULT = ('st', 'stmatrix', 'cp', 'bar', 'barrier', 'bra', 'fence')


def registers(operand) -> set[str]:
    """Names of the registers in an operand."""
    if isinstance(operand, Register):
        return {operand.name}
    if isinstance(operand, Vector):
        return set().union(*(registers(x) for x in operand.items))
    return registers(operand.base) if isinstance(operand, Address) else set()


def early_uses(kernel: Kernel) -> Iterator[Instruction]:
    """Instructions, in text order, that read or write a sum in flight, or write a first operand's register."""
    # per group of products in flight, the last one still open: sums, registers of the first operand
    groups: list[tuple[set[str], set[str]]] = [(set(), set())]
    for x in kernel.instructions:
        if x.opcode[0] == 'wgmma':
            if x.opcode[1] == 'mma_async':
                groups[-1][0].update(registers(x.operands[0]))
                groups[-1][1].update(registers(x.operands[1]) if isinstance(x.operands[1], Vector) else ())
            elif x.opcode[1] == 'commit_group':
                groups.append((set(), set()))
            elif x.opcode[1] == 'wait_group':
                groups = groups[len(groups) - 1 - min(x.operands[0].value, len(groups) - 1):]
            continue
        if x.opcode[0] in ('ret', 'exit'):
            groups = [(set(), set())]
        results = 0 if x.opcode[0] in NO_RESULT else 1
        written = set().union(*(registers(y) for y in x.operands[:results]))
        used = written.union(*(registers(y) for y in x.operands))
        if any(used & sums or written & operands for sums, operands in groups):
            yield x
