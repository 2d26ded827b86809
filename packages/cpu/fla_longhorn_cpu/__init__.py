"""Longhorn's operators on the CPU in loops compiled by Numba, which `import fla_longhorn` finds by an entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fla_longhorn.ops.backends import Loops
    from fla_longhorn.patches.changes import Changes


def register(changes: Changes) -> Loops:
    """Make fla's modules run on the CPU, and return the loops in which Longhorn's operators and modules run there."""
    import fla_cpu
    from fla_longhorn_cpu import loops

    fla_cpu.register(changes)
    return loops
