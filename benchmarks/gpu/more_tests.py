"""The tests' other parameter sets."""

from __future__ import annotations

from benchmarks.gpu.tests import by_turn, collected, run_all

__all__ = ['items', 'run_all']


def items(device: str) -> list[str]:
    return by_turn(collected(device))[1]
