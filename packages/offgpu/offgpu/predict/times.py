"""From a launch to a time: occupancy, an SM's blocks simulated, and the rest by proportion.

A launch whose grid does not grow with the tokens walks over them: it is simulated for two short lengths, and the difference
gives what a token costs. Where the grid grows, blocks have a fixed length and are simulated whole, one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from offgpu.launches import Launch
from offgpu.predict.machine import Machine
from offgpu.predict.runs import Runs, parts_of, walked_tokens
from offgpu.predict.simulate import Result, simulate
from offgpu.predict.sources import Source, sources_of

# blocks of a fixed length that are simulated, in units of what an SM holds
BLOCKS_IN_TURN = 2
# blocks all over the grid that show whether all take one path, and how many are simulated where they do not
PROBES, BLOCKS_OF_MANY_PATHS = 16, 64


@dataclass
class Prediction:
    """Times in seconds; `share` of scheduler cycles by what they went to; `issue_bound`: were there no waiting.

    `storages` are those that it touches: a kernel is given some that only another launch of it reads.
    """

    kernel: str
    seconds: float
    issue_bound: float
    dram_seconds: float
    dram_bytes: float
    share: dict[str, float] = field(default_factory=dict)
    registers: int = 0
    spills: int = 0
    loops: list[int] = field(default_factory=list)
    resident: int = 0
    occupancy: int = 0
    blocks: int = 1
    num_warps: int = 0
    instructions: float = 0.0
    notes: list[str] = field(default_factory=list)
    storages: set[int] = field(default_factory=set)
    # the time of an SM's warps, whatever the bytes of all SMs
    sm_seconds: float = 0.0
    # of an autotuned kernel
    configuration: str = ''

    @property
    def rank(self) -> float:
        """The time; of those that DRAM bounds alike, the one whose SMs wait less comes first."""
        return self.seconds + 1e-3 * self.sm_seconds

    @property
    def floor(self) -> float:
        return max(self.issue_bound, self.dram_seconds)


def occupancy(launch: Launch, machine: Machine) -> int:
    """Blocks that an SM holds."""
    registers = math.ceil(launch.code().registers / 8) * 8 * 32 * launch.num_warps
    shared = launch.shared + 1024
    return max(min(
        machine.registers // registers, machine.max_warps // launch.num_warps, machine.max_blocks,
        machine.shared_bytes // shared if launch.shared else machine.max_blocks,
    ), 1)


def chosen_blocks(launch: Launch, machine: Machine, count: int) -> list[int]:
    """The blocks that one SM gets."""
    return [i * machine.multiprocessors % launch.blocks for i in range(count)]


def spread_blocks(launch: Launch, count: int) -> list[int]:
    """Blocks all over the grid, in no step that its sizes share."""
    return [int(launch.blocks * (i * 0.6180339887 % 1)) for i in range(count)]


@dataclass
class Walk:
    """What `n` blocks on an SM take for the whole length."""

    cycles: float
    issued: float
    share: dict[str, float]
    moved: dict[str, float]


def walk(runs: Runs, machine: Machine, parts: tuple[float, float], n: int, source: Source) -> Walk:
    blocks, code = chosen_blocks(runs.launch, machine, n), runs.launch.code()

    def run(part: float) -> Result:
        return simulate(code, machine, runs.paths(part, blocks), source.levels, n, source.shares)

    a, b = run(parts[0]), run(parts[1])
    times = (1 - parts[0]) / (parts[1] - parts[0])
    steady = max(4 * (b.cycles - a.cycles), 1e-9)
    idle = Counter({k: v - a.idle.get(k, 0) for k, v in b.idle.items() if v > a.idle.get(k, 0)})
    return Walk(
        a.cycles + times * (b.cycles - a.cycles), a.issued + times * (b.issued - a.issued),
        {'issue': (b.issued - a.issued) / steady} | {k: v / steady for k, v in idle.most_common()},
        {k: a.bytes.get(k, 0) + times * (v - a.bytes.get(k, 0)) for k, v in b.bytes.items()},
    )


def predict(launch: Launch, machine: Machine, seen: set[int], runs: Runs | None = None) -> Prediction:
    """The time of one launch; `seen` are the storages that earlier launches of the pass touched."""
    if launch.binary is None:
        dram = launch.nbytes / machine.dram_bandwidth
        return Prediction(
            launch.kernel, dram + machine.launch_seconds, 0.0, dram, launch.nbytes, share={'copies by PyTorch': 1.0},
            storages={a.storage for a in launch.arguments},
        )
    total, occ = launch.blocks, occupancy(launch, machine)
    per_sm = math.ceil(total / machine.multiprocessors)
    resident = min(occ, per_sm)
    runs, tokens = runs or Runs(launch), walked_tokens(launch)
    parts = None if tokens is None else parts_of(runs, tokens)
    count = min(per_sm, max(BLOCKS_IN_TURN * occ, 4))
    blocks = chosen_blocks(launch, machine, count)
    if parts is None and len({id(runs.follow(1.0, block)[0]) for block in spread_blocks(launch, PROBES)}) > 1:
        count = min(BLOCKS_OF_MANY_PATHS, total)
        blocks = spread_blocks(launch, count)
    source = sources_of(launch, runs, parts, machine, seen, blocks)
    if parts is None:
        paths = runs.paths(1.0, blocks)
        r = simulate(launch.code(), machine, paths, source.levels, resident, source.shares)
        # blocks follow each other without a gap: by their number, the last wave's end counted once
        cycles = r.cycles * (total / machine.multiprocessors if per_sm > count else per_sm) / count
        issued, share, moved = r.issued / count, r.share(), {k: v / count * total for k, v in r.bytes.items()}
    else:
        waves, rest = divmod(total, machine.multiprocessors * resident)
        whole = walk(runs, machine, parts, resident, source)
        cycles, issued, share = whole.cycles * waves, whole.issued / resident, whole.share
        moved = {k: v / resident * total for k, v in whole.moved.items()}
        if rest:
            n = math.ceil(rest / machine.multiprocessors)
            cycles += (whole if n == resident else walk(runs, machine, parts, n, source)).cycles
    dram = sum(v for k, v in moved.items() if k.startswith('DRAM')) + source.shared_bytes
    seconds = max(cycles / machine.clock, dram / machine.dram_bandwidth)
    # were the device's schedulers all busy
    issue = issued * total / (4 * machine.multiprocessors) / machine.clock
    return Prediction(
        launch.kernel, seconds + machine.launch_seconds, issue, dram / machine.dram_bandwidth, dram, share,
        launch.code().registers, launch.code().spills, launch.compiled().hot, resident, occ, total, launch.num_warps,
        issued * total, sorted(set(runs.notes)), source.storages, cycles / machine.clock, launch.configuration,
    )


def predict_pass(
    launches: list[Launch], machine: Machine, predict: Callable[[Launch, Machine, set[int]], Prediction] = predict,
) -> list[Prediction]:
    """All launches of a pass in order; of the candidates of an autotuned kernel the fastest counts."""
    seen: set[int] = set()
    out: list[Prediction] = []
    choices: list[Prediction] = []
    for i, launch in enumerate(launches):
        p = predict(launch, machine, seen)
        following = launches[i + 1].choice if i + 1 < len(launches) else None
        if launch.choice is not None:
            choices.append(p)
            if following is not None and following > launch.choice:
                continue
            p, choices = min(choices, key=lambda p: p.rank), []
        out.append(p)
        seen.update(p.storages - {0})
    return out
