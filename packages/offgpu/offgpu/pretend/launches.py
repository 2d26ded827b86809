"""Launches on the device from Python: counted, and recorded during graph capture."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from offgpu.pretend import counting, library

_numbers = itertools.count(1)
# the launches of each graph by number; the last graph is the one being captured
_graphs: dict[int, dict[int, Callable[[], None]]] = {}
_running: dict[int, Callable[[], None]] = {}
_errors: list[BaseException] = []


def is_capturing() -> bool:
    return bool(library.get().pretend_is_capturing())


def note(name: str, grid: tuple | None, again: Callable[[], None]) -> None:
    """A kernel is launched; `again()` launches it on the same memory."""
    counting.note_launch(name, grid)
    if is_capturing():
        number = next(_numbers)
        _graphs[max(_graphs)][number] = again
        library.get().pretend_record_launch(number)


@library.LAUNCH_AGAIN
def _launch_again(number: int) -> None:
    # exceptions cannot pass through ctypes
    try:
        if not _errors:
            _running[number]()
    except BaseException as error:
        _errors.append(error)


def begin_capture() -> int:
    import torch
    library.get().pretend_on_launch_again(_launch_again)
    graph = torch.ops.pretend.begin_capture()
    _graphs[graph] = {}
    return graph


def end_capture(graph: int) -> None:
    import torch
    torch.ops.pretend.end_capture(graph)


def replay(graph: int | None) -> None:
    import torch
    _running.clear()
    _running.update(_graphs.get(graph or 0, {}))
    torch.ops.pretend.replay(graph or 0)
    if _errors:
        raise _errors.pop()


def drop(graph: int) -> None:
    _graphs.pop(graph, None)
    library.get().pretend_drop_graph(graph)
