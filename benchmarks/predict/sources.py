"""Where a kernel's tensors come from, DRAM or L2, found from what its blocks touch and how large the tensors are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.predict.machine import Machine

if TYPE_CHECKING:
    from benchmarks.predict.capture import Launch
    from benchmarks.predict.simulate import Path
    from benchmarks.predict.times import Runs

# blocks that read a sector from which on it is taken as being in L2: one of them has brought it
READERS = 4
# part of L2 that one pass's tensors may count on while others stream through
L2_PART = 0.5


@dataclass
class Source:
    """`levels` and `shares` are those of `simulate`; `shared_bytes` is what DRAM moves once for tensors that come from L2."""

    levels: dict[str, str] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    shared_bytes: float = 0.0


def touched(block: list[Path]) -> dict[str, tuple[int, int]]:
    """(different sectors, all sectors) that a block touches of each tensor."""
    base = block[0].trace
    of_tensor: dict[str, list[np.ndarray]] = {}
    for a in base.accesses:
        if a is not None and a.pattern is not None:
            of_tensor.setdefault(a.tensor, []).append(a.pattern + a.first)
    out = {}
    for tensor, parts in of_tensor.items():
        own = np.concatenate(parts)
        different = np.unique(own)
        shifts = {p.shift.get(tensor, 0) for p in block}
        every = np.unique(np.concatenate([different + shift for shift in shifts]))
        out[tensor] = (len(every), len(own) * len(block))
    return out


def sources_of(
    launch: Launch, runs: Runs, parts: tuple[float, float] | None, machine: Machine, seen: set[int],
) -> Source:
    """A tensor that several blocks read comes from L2, as does a small one that an earlier kernel of the pass has touched.

    What blocks write again and again (scratch) stays in L2 as far as it fits.
    """
    source, room = Source(), machine.l2_size * L2_PART
    if parts is None:
        sectors = {t: (n, n) for t, (n, _) in touched(runs.paths(1.0, [0])[0]).items()}
    else:
        a, b = (touched(runs.paths(part, [0])[0]) for part in parts)
        times = (1 - parts[0]) / (parts[1] - parts[0])
        sectors = {t: tuple(a.get(t, (0, 0))[i] + times * (b[t][i] - a.get(t, (0, 0))[i]) for i in (0, 1)) for t in b}
    for argument in launch.arguments:
        if argument.name not in sectors or not argument.nbytes:
            continue
        name, size = argument.name, argument.nbytes
        different, every = sectors[name]
        readers = 32 * different * launch.blocks / size
        kept = argument.storage in seen and size <= room
        again = parts is not None and every > 1.5 * different and 32 * different * launch.blocks < 1.5 * size
        if kept or readers >= READERS or again and size <= room:
            source.levels[name] = 'l2'
            source.shared_bytes += 0 if kept else size
        elif again and every > 4 * different:
            # rewritten often, but larger than L2's part
            source.shares[name] = 1 - room / size
        elif readers > 1:
            source.shares[name] = 1 / readers
    return source
