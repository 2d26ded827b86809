"""How the warps of a launch walk through it: interpreted once, whatever the constants of the model."""

from __future__ import annotations

import math
from collections import Counter

from offgpu.launches import Launch
from offgpu.predict.needed import needed_at
from offgpu.predict.simulate import Path
from offgpu.predict.warp import Layout, Trace, Warp
from offgpu.sass import Program

# the shortest walk that is simulated, in tokens; twice as long until that adds this many instructions of a warp
SHORTEST, ADDED_STEPS = 64, 2000
# instructions within which the warps of other blocks show where their tensors lie
MOST_COMPARED = 60_000
# ways through a kernel that its blocks may take
MOST_PATHS = 8
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
    """The tokens that a block walks over, or None where blocks have a fixed length, which may be a constant of the kernel."""
    if launch.other is None or launch.other.grid != launch.grid or launch.other.constants != launch.constants:
        return None
    growing = {n: x for n, x in launch.scalars.items() if launch.other.scalars[n] != x}
    lengths = [x for n, x in growing.items() if n in ('T', 'L', 'TS')] or list(growing.values())
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


class Lead:
    """A path that warps are followed along: the positions that say where they touch memory, and whether they keep to it."""

    def __init__(self, program: Program, trace: Trace) -> None:
        self.trace = trace
        self.first = {instruction: i for instruction, i in first_touches(trace).items() if i < MOST_COMPARED}
        self.wanted = set(self.first.values())
        self.positions = needed_at(program, trace.steps[:max(self.wanted, default=-1) + 1], self.wanted)
        self.whole = needed_at(program, trace.steps[:MOST_COMPARED], self.wanted)

    def shift(self, sectors: dict[int, int] | None) -> dict[int, int]:
        """How far each instruction's sectors lie from the path's."""
        if sectors is None:
            return {}
        accesses = self.trace.accesses
        shift = {x: sectors[i] - accesses[i].first for x, i in self.first.items() if i in sectors}
        # where no lane is active: as elsewhere in the tensor
        near = {accesses[self.first[x]].tensor: shift[x] for x in reversed(shift)}
        return shift | {x: near.get(accesses[i].tensor, 0) for x, i in self.first.items() if i not in sectors}


class Runs:
    """The paths of one launch's warps, for any part of its length."""

    def __init__(self, launch: Launch, notes: list[str] | None = None) -> None:
        self.launch, self.notes = launch, [] if notes is None else notes
        self.bases: dict[float, Trace] = {}
        self.known: dict[tuple, list[list[Path]]] = {}
        self.led: dict[float, list[Lead]] = {}

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

    def leads(self, part: float) -> list[Lead]:
        if part not in self.led:
            self.led[part] = [Lead(self.launch.code(), self.base(part))]
        return self.led[part]

    def follow(self, part: float, block: int) -> tuple[Lead, dict[int, int] | None]:
        """The path of a block's first warp, and where it touches memory first; None: where the path's own does.

        Blocks may end early or have more to do, by their place alone: the first to go another way is interpreted as a whole.
        """
        leads = self.leads(part)
        for lead in leads:
            sectors, left = self.warp(part, block, 0).sectors(lead.trace.steps, lead.whole, lead.wanted)
            if not left:
                return lead, sectors
        if len(leads) == MOST_PATHS:
            self.notes.append(f'blocks of more than {MOST_PATHS} paths')
            return leads[0], None
        leads.append(Lead(self.launch.code(), self.warp(part, block, 0).run()))
        return leads[-1], None

    def paths(self, part: float, blocks: list[int]) -> list[list[Path]]:
        """The warps of `blocks`; those of a block take its first one's path.

        Where each instruction first touches memory says how far a warp's addresses lie from those of the path.
        """
        if (known := self.known.get((part, *blocks))) is not None:
            return known
        out, differ = [], 0
        for block in blocks:
            lead, sectors = self.follow(part, block)
            members = [Path(lead.trace, lead.shift(sectors))]
            for w in range(1, self.launch.num_warps):
                sectors, left = self.warp(part, block, w).sectors(lead.trace.steps, lead.positions, lead.wanted)
                differ += left
                members.append(Path(lead.trace, lead.shift(sectors)))
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
