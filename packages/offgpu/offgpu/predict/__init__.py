"""The time that a launch may take on a GPU that is not there, and what its cycles go to.

SASS is decoded with its scheduling bits. The integer side of a warp is interpreted, which gives its path and addresses. The
warps of one multiprocessor are issued in order: stall counts, scoreboards, pipes, register ports, bank conflicts, L1, L2 and a
multiprocessor's part of DRAM bandwidth. Some constants were set by published timings (:mod:`offgpu.predict.machine`).

Not modelled: instruction cache misses, TLB, L2 slices, DRAM pages, clock changes, divergence inside a warp, atomics, TMA.
"""
