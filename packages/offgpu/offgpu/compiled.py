"""Registers, spills and the loops' instructions of a kernel's machine code."""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass, field

from offgpu.sass import Program


@dataclass
class Loop:
    """A loop of the compiled code: its instructions by name, without inner loops, and its nesting depth."""

    mix: collections.Counter
    depth: int
    order: int
    innermost: bool

    @property
    def instructions(self) -> int:
        return sum(self.mix.values())


@dataclass
class Compiled:
    """Figures of a kernel's code for one target; None if the target's tools do not report one."""

    registers: int | None
    spills: int | None
    mix: collections.Counter
    loops: list[Loop] = field(default_factory=list)

    @property
    def hot(self) -> list[int]:
        """Lengths of the innermost loops; shorter ones wait for tensor cores or memory."""
        return sorted(loop.instructions for loop in self.loops if loop.innermost and loop.instructions > 60)

    def count(self, *names: str) -> int:
        return sum(n for name, n in self.mix.items() if name in names)


def count_sass(program: Program) -> Compiled:
    names = [x.base for x in program.code]
    # the code ends in a jump to itself
    spans = [(x.target, i) for i, x in enumerate(program.code) if x.base == 'BRA' and x.target is not None and x.target < i]
    return Compiled(program.registers, program.spills, collections.Counter(names), own_loops(names, spans))


def own_loops(names: list[str], spans: list[tuple[int, int]]) -> list[Loop]:
    """Each loop with its own instructions: an instruction belongs to the innermost loop around it."""
    spans = sorted(set(spans), key=lambda span: (span[0], -span[1]))
    owners = [None] * len(names)
    for i, (first, last) in sorted(enumerate(spans), key=lambda item: item[1][0] - item[1][1]):
        owners[first:last + 1] = [i] * (last + 1 - first)
    return [
        Loop(
            mix=collections.Counter(name for name, owner in zip(names, owners, strict=True) if owner == i),
            depth=sum(a <= first and last <= b for a, b in spans) - 1, order=i,
            innermost=not any(first <= a and b <= last for a, b in spans if (a, b) != (first, last)),
        )
        for i, (first, last) in enumerate(spans)
    ]


def count_amdgcn(assembly: str) -> Compiled:
    def number(key):
        found = re.search(rf'\.{key}:\s+(\d+)', assembly)
        return None if found is None else int(found[1])

    names = re.findall(r'^\s+([a-z][a-z0-9]*_[a-z0-9_]+)', assembly, flags=re.MULTILINE)
    return Compiled(number('vgpr_count'), number('vgpr_spill_count'), collections.Counter(names))
