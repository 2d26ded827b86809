"""The vectors of the operators' loops: `W` channels of one key, several registers on any CPU.

What a token's channels share, such as its key, is read once per vector; a sum over channels first adds a vector's registers.
"""

from __future__ import annotations

from fla_kit.numba.memory import vectors
from fla_kit.numba.simd import WIDE as W
from fla_kit.numba.simd import wide

__all__ = ['W', 'load', 'load_lanes', 'prefetch', 'prefetch_to_write', 'splat', 'store_lanes']

splat, load, load_lanes, store_lanes, prefetch, prefetch_to_write = vectors(wide)
