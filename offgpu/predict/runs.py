"""How the warps of a launch walk through it: interpreted once, whatever the constants of the model."""

from __future__ import annotations

import math
from collections import Counter

from offgpu.launches import Launch
from offgpu.predict.needed import needed_at
from offgpu.predict.simulate import Path
from offgpu.predict.warp import Layout, Trace, Warp

# the shortest walk that is simulated, in tokens; twice as long until that adds this many instructions of a warp
SHORTEST, ADDED_STEPS = 64, 2000
# instructions within which the warps of other blocks show where their tensors lie
MOST_COMPARED = 60_000
# accesses, as a part of all, that may be taken to lie where the first warp's do
SELDOM = 0.01


def shortened(launch: Launch, part: float) -> list[tuple[str, str, object]]:
    """The arguments for a part of the length: the scalars that grow with the tokens in proportion."""
    others = launch.other.scalars
    return [
        (a.name, a.kind, math.ceil(a.value * part) if part < 1 and others.get(a.name, a.value) != a.value else a.value)
        for a in launch.arguments
    ]


def walked_tokens(launch: Launch) -> int | None:
    """The tokens that a block walks over, or None where blocks have a fixed length."""
    if launch.other is None or launch.other.grid != launch.grid:
        return None
    growing = {n: x for n, x in launch.scalars.items() if launch.other.scalars[n] != x}
    lengths = [x for n, x in growing.items() if n in ('T', 'L')] or list(growing.values())
    return min(lengths, default=None)


def first_touches(trace: Trace) -> dict[int, int]:
    """The step at which each instruction first touches a tensor; but for tensors that are touched last and hardly ever."""
    first: dict[int, int] = {}
    counts: Counter = Counter()
    for i, a in enumerate(trace.accesses):
        if a is not None and a.pattern is not None:
            first.setdefault(trace.steps[i], i)
            counts[a.tensor] += 1
    spare = SELDOM * counts.total()
    begin = {trace.accesses[i].tensor: i for i in reversed(first.values())}
    for tensor in sorted(begin, key=begin.__getitem__, reverse=True):
        spare -= counts[tensor]
        if spare < 0:
            break
        del begin[tensor]
    return {instruction: i for instruction, i in first.items() if trace.accesses[i].tensor in begin}


class Runs:
    """The paths of one launch's warps, for any part of its length."""

    def __init__(self, launch: Launch, notes: list[str] | None = None) -> None:
        self.launch, self.notes = launch, [] if notes is None else notes
        self.bases: dict[float, Trace] = {}
        self.known: dict[tuple, list[list[Path]]] = {}

    def warp(self, part: float, block: int, w: int) -> Warp:
        gx, gy, gz = self.launch.grid
        layout = Layout(shortened(self.launch, part), self.launch.capability)
        place = (block % gx, block // gx % gy, block // (gx * gy))
        return Warp(self.launch.code(), layout, place, (gx, gy, gz), w, self.launch.num_warps)

    def base(self, part: float) -> Trace:
        """The first warp of the first block, interpreted to its end."""
        if part not in self.bases:
            trace = self.bases[part] = self.warp(part, 0, 0).run()
            if not trace.complete:
                self.notes.append('path cut short')
            if trace.unknown:
                self.notes.append(f'not interpreted: {trace.unknown}')
            if trace.mixed_branches:
                self.notes.append('branches taken by part of a warp')
        return self.bases[part]

    def paths(self, part: float, blocks: list[int]) -> list[list[Path]]:
        """The warps of `blocks`; all take the first one's path, and tell where each instruction first touches memory.

        That says how far their addresses lie from the first one's.
        """
        if (known := self.known.get((part, *blocks))) is not None:
            return known
        base, program = self.base(part), self.launch.code()
        first = {instruction: i for instruction, i in first_touches(base).items() if i < MOST_COMPARED}
        limit, wanted = max(first.values(), default=-1) + 1, set(first.values())
        positions = needed_at(program, base.steps[:limit], wanted)
        out, differ = [], 0
        for block in blocks:
            members = []
            for w in range(self.launch.num_warps):
                shift: dict[int, int] = {}
                if (block, w) != (0, 0):
                    sectors, left = self.warp(part, block, w).sectors(base.steps, positions, wanted)
                    differ += left
                    shift = {x: sectors[i] - base.accesses[i].first for x, i in first.items() if i in sectors}
                    # where no lane of it is active, or where it does not come: as elsewhere in the tensor
                    near = {base.accesses[first[x]].tensor: shift[x] for x in reversed(shift)}
                    shift |= {x: near.get(base.accesses[i].tensor, 0) for x, i in first.items() if i not in sectors}
                members.append(Path(base, shift))
            out.append(members)
        if differ:
            self.notes.append(f'{differ} of {len(blocks) * self.launch.num_warps} warps begin on another path')
        self.known[(part, *blocks)] = out
        return out


def parts_of(runs: Runs, tokens: int) -> tuple[float, float] | None:
    """Two lengths to simulate, as parts of the whole; None where that is short itself."""
    n = SHORTEST
    while 4 * n <= tokens:
        if len(runs.base(2 * n / tokens).steps) - len(runs.base(n / tokens).steps) >= ADDED_STEPS:
            return n / tokens, 2 * n / tokens
        n *= 2
    return None
