"""Counts operators, kernels, allocations and host-device synchronisations of a piece of code."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offgpu.pretend import library

HERE = Path(__file__).parent
# frames of a stack that are kept, from the innermost
DEPTH = 6


@dataclass
class Counts:
    """`ops` of PyTorch and `launches` of Triton by name, `grids` of the launches in order, `allocations` of device memory,
    `syncs`: waits of the host by kind and operator, and `stacks`: the same with where they come from."""

    ops: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    grids: list[tuple[str, tuple | None]] = field(default_factory=list)
    syncs: Counter[str] = field(default_factory=Counter)
    stacks: Counter[str] = field(default_factory=Counter)
    allocations: int = 0


_now: Counts | None = None
# ctypes does not keep its callbacks
_listener: Any = None


def note_launch(name: str, grid: tuple | None) -> None:
    if _now is not None:
        _now.launches[name] += 1
        _now.grids.append((name, grid))


def short_path(path: str) -> str:
    """A file's path relative to the folder that it is imported from."""
    folders = [f'{x.rstrip("/")}/' for x in sys.path if x and path.startswith(f'{x.rstrip("/")}/')]
    return path.removeprefix(max(folders, key=len, default=''))


def where() -> str:
    """The frames that wait, innermost first, without PyTorch's and this package's."""
    frames = [(short_path(x.filename), x.lineno) for x in reversed(traceback.extract_stack()) if '<frozen' not in x.filename
              and not x.filename.startswith(f'{HERE}/')]
    own = [f'{path}:{line}' for path, line in frames if not path.startswith('torch/')]
    return ' <- '.join(own[:DEPTH])


def listen() -> None:
    """Record each wait with its stack."""
    global _listener

    @library.LISTENER
    def note_wait(kind: bytes, detail: bytes) -> None:
        if _now is not None:
            _now.stacks[f'{kind.decode()} {detail.decode()} | {where()}'] += 1

    _listener = note_wait
    library.get().pretend_listen(note_wait)


@contextmanager
def counted() -> Iterator[Counts]:
    """`with counted() as counts:` fills in `counts` when the body ends. Not nested."""
    global _now
    if _now is not None:
        raise RuntimeError('counted() inside counted()')
    lib, counts = library.get(), Counts()
    lib.pretend_reset()
    lib.pretend_counting(1)
    _now = counts
    try:
        yield counts
    finally:
        _now = None
        lib.pretend_counting(0)
        for line in lib.pretend_counts().decode().splitlines():
            number, name = line.split('\t')
            kind, _, rest = name.partition(' ')
            (counts.ops if kind == 'OP' else counts.syncs)[rest] = int(number)
        counts.allocations = lib.pretend_allocations()
