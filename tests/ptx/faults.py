"""Faults planted in the PTX of recorded launches: is each of them found?

A launch is recorded with what its storages held before it, so that it can run again with one line of its PTX changed. What
the changed launch finds more than the sound one counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from offgpu.emulator import Emulator, Launch
from offgpu.emulator.emulate import bytes_of
from tests.ptx.calls import Call
from tests.ptx.execute import execute


@dataclass
class Recording:
    """A launch and its memory: each storage's tensor, its bytes before, which of them were written, and its bytes after."""

    launch: Launch
    before: dict[int, tuple[torch.Tensor, np.ndarray, np.ndarray]]
    after: dict[int, np.ndarray] = field(default_factory=dict)


class Recorder(Emulator):
    """Keeps each launch that it executes."""

    recordings: list[Recording]

    def launch(self, launch: Launch) -> None:
        tensors = {x.untyped_storage().data_ptr(): x for _, _, x in launch.arguments if isinstance(x, torch.Tensor)}
        before = {
            pointer: (x, bytes_of(x).copy(), np.array(self.written(pointer), copy=True)) for pointer, x in tensors.items()
        }
        super().launch(launch)
        self.recordings.append(Recording(launch, before, {pointer: bytes_of(x).copy() for pointer, x in tensors.items()}))


def record(call: Call) -> list[Recording]:
    """All launches of a call."""
    recorder = Recorder(call.target)
    recorder.recordings = []
    execute(call, recorder)
    return recorder.recordings


class Replay(Emulator):
    """Runs a recorded launch with other PTX."""

    before: dict

    def written(self, pointer: int) -> np.ndarray | np.bool_:
        return self.before[pointer][2]


def replay(recording: Recording, ptx: str) -> tuple[set[tuple[str, str]], bool]:
    """(kind and instruction of each finding, whether all bytes are as they were after the recorded launch)."""
    emulator = Replay()
    emulator.before = recording.before
    now = {pointer: bytes_of(x).copy() for pointer, (x, _, _) in recording.before.items()}
    try:
        for x, data, _ in recording.before.values():
            bytes_of(x)[:] = data
        emulator.launch(replace(recording.launch, ptx=ptx))
        same = all((bytes_of(x) == recording.after[pointer]).all() for pointer, (x, _, _) in recording.before.items())
    finally:
        for pointer, (x, _, _) in recording.before.items():
            bytes_of(x)[:] = now[pointer]
    return {(x.kind, x.instruction) for x in emulator.findings}, same


@dataclass(frozen=True)
class Kind:
    """A fault: the lines of PTX that it can befall, and what it makes of one."""

    lines: str
    change: Callable[[str], str]


# a barrier of the block or of a warp is missing
BARRIER = Kind(r'\s*(bar\.sync|bar\.warp\.sync|barrier\.sync)\b', lambda line: '')
# a load or store of global memory has lost its mask
MASK = Kind(r'\s*@!?%\w+\s+(ld|st)\.global', lambda line: re.sub(r'@!?%\w+', '', line, count=1))
# a store to global memory is missing
STORE = Kind(r'\s*(@!?%\w+\s+)?st\.global', lambda line: '')


@dataclass
class Fault:
    """A planted fault, and what came of it: kinds of the findings, and whether results were still the same."""

    kernel: str
    number: int
    line: str
    kinds: list[str]
    same: bool

    @property
    def found(self) -> bool:
        return bool(self.kinds)


def planted(recordings: list[Recording], kind: Kind, kernel: str = '') -> Iterator[Fault]:
    """Plant a fault in each line that it can befall, of each kernel's first launch, or of the kernel of this name."""
    seen = set()
    for recording in recordings:
        launch = recording.launch
        if launch.name in seen or kernel not in ('', launch.name):
            continue
        seen.add(launch.name)
        sound, _ = replay(recording, launch.ptx)
        lines = launch.ptx.splitlines()
        for i, line in enumerate(lines):
            if re.match(kind.lines, line):
                found, same = replay(recording, '\n'.join([*lines[:i], kind.change(line), *lines[i + 1:]]))
                yield Fault(launch.name, i + 1, line.strip(), sorted({x for x, _ in found - sound}), same)
