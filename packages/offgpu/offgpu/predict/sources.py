"""Where a kernel's tensors come from, DRAM or L2, found from what its blocks touch and how large the tensors are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from offgpu.predict.machine import Machine
from offgpu.predict.simulate import L2_PART

if TYPE_CHECKING:
    from offgpu.launches import Launch
    from offgpu.predict.runs import Runs
    from offgpu.predict.simulate import Path

# blocks that read a sector from which on it is taken as being in L2: one of them has brought it
READERS = 4
# times that a stored tensor is touched, over all blocks, from which on blocks do so again and again
REWRITTEN = 1.5


@dataclass
class Source:
    """`levels` and `shares` are those of `simulate`; `shared_bytes` is what DRAM moves beside what is simulated.

    `storages` are those that the kernel touches, of all that it is given.
    """

    levels: dict[str, str] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    shared_bytes: float = 0.0
    storages: set[int] = field(default_factory=set)


def touched(block: list[Path]) -> dict[str, tuple[int, int]]:
    """(different sectors, all sectors) that a block touches of each tensor."""
    base = block[0].trace
    of_instruction: dict[tuple[str, int], list[np.ndarray]] = {}
    for x, a in zip(base.steps, base.accesses, strict=True):
        if a is not None and a.pattern is not None:
            of_instruction.setdefault((a.tensor, x), []).append(a.pattern + a.first)
    sectors: dict[str, list[np.ndarray]] = {}
    every: Counter = Counter()
    for (tensor, x), parts in of_instruction.items():
        own = np.concatenate(parts)
        every[tensor] += len(own) * len(block)
        different = np.unique(own)
        sectors.setdefault(tensor, []).extend(different + shift for shift in {p.shift.get(x, 0) for p in block})
    return {tensor: (len(np.unique(np.concatenate(parts))), every[tensor]) for tensor, parts in sectors.items()}


def touched_by_some(blocks: list[list[Path]]) -> dict[str, float]:
    """Sectors of each tensor that one of `blocks` touches on average; those of one path touch as many."""
    of_path: dict[int, dict[str, tuple[int, int]]] = {}
    sums: Counter = Counter()
    for block in blocks:
        if (trace := id(block[0].trace)) not in of_path:
            of_path[trace] = touched(block)
        sums.update({tensor: n for tensor, (n, _) in of_path[trace].items()})
    return {tensor: n / len(blocks) for tensor, n in sums.items()}


def sources_of(
    launch: Launch, runs: Runs, parts: tuple[float, float] | None, machine: Machine, seen: set[int], blocks: list[int],
) -> Source:
    """A tensor that several blocks read comes from L2, as does a small one that an earlier kernel of the pass has touched.

    What blocks write again and again (scratch) stays in L2 as far as it fits. What the simulated walks are too short to touch
    more than once counts with the whole tensor's bytes, though not with its instructions.
    """
    source, room = Source(), machine.l2_size * L2_PART
    again: set[str] = set()
    stored: set[str] = set()
    seldom: set[str] = set()
    if parts is None:
        sectors = touched_by_some(runs.paths(1.0, blocks))
    else:
        a, b = (touched(runs.paths(part, [0])[0]) for part in parts)
        times = (1 - parts[0]) / (parts[1] - parts[0])
        before = {t: a.get(t, (0, 0)) for t in b}
        sectors = {t: before[t][0] + times * (n - before[t][0]) for t, (n, _) in b.items()}
        stored = {x.tensor for x in runs.base(parts[1]).accesses if x is not None and x.store}
        # the longer walk touches the same memory more often
        again = {t for t, (n, every) in b.items() if n < 1.1 * before[t][0] and every > 1.5 * before[t][1]}
        # both walks touch the same, for both are shorter than its period: states that are saved now and then
        seldom = {t for t in b if b[t] == before[t]}
    for argument in launch.arguments:
        if argument.name not in sectors or not argument.nbytes:
            continue
        name, size = argument.name, argument.nbytes
        source.storages.add(argument.storage)
        readers = 32 * sectors[name] * launch.blocks / size
        kept = argument.storage in seen and size <= room
        if name in stored and readers > REWRITTEN:
            # no others read it: a block touches its own again and again, in a longer period than those of the walks
            again.add(name)
        if kept or name in again and size <= room or readers >= READERS and name not in again:
            source.levels[name] = 'l2'
            source.shared_bytes += 0 if kept else size
        elif name in seldom:
            source.shared_bytes += max(size * (1 - readers), 0)
        elif name in again:
            source.shares[name] = 1 - room / size
        elif readers > 1:
            source.shares[name] = 1 / readers
    return source
