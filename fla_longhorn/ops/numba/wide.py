"""The vectors of the operators' loops: `W` channels of one key, several registers of any CPU.

What the channels of a token have in common, such as its key, is read once for all of them, and sums over channels are of
few lanes more than those of one register.
"""

from __future__ import annotations

from fla_cpu.numba.memory import vectors
from fla_cpu.numba.simd import WIDE as W
from fla_cpu.numba.simd import wide

__all__ = ['W', 'load', 'load_lanes', 'prefetch', 'prefetch_to_write', 'splat', 'store_lanes']

splat, load, load_lanes, store_lanes, prefetch, prefetch_to_write = vectors(wide)
