"""The tests' other parameter sets."""

from __future__ import annotations

from benchmarks.gpu.tests import by_turn, collected, run_all

__all__ = ['items', 'run_all']

# its 22 other cases alone use 678 of the 4,215 kernels of a kit, a quarter of its size
LEFT_OUT = 'tests/ops/test_ones.py::test_sizes_of_one['


def items(device: str) -> list[str]:
    return [name for name in by_turn(collected(device))[1] if not name.startswith(LEFT_OUT)]
