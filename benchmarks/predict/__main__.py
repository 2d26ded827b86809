"""Predicted times of the kernels on a GPU that is not there, and what their cycles go to: uncalibrated.

    python -m benchmarks.predict [--pass diagonal_fwd ...] [--K 16 ...] [--shape 8,2048,4096 ...] [--gpu H100] [--json FILE]

The launches are those that the wrappers make, compiled for the GPU. Their SASS is decoded with its scheduling bits. The
integer side of a warp is interpreted, which gives its path and addresses. The warps of one multiprocessor are issued in order:
stall counts, scoreboards, pipes, register ports, bank conflicts, L1, L2 and a multiprocessor's part of DRAM bandwidth. The
constants and their sources are in `machine.py`; `--set dram=700` changes one. Ratios between kernels are what it is good for:
no constant was checked against a GPU of ours. Of a B200 too little is published to simulate it: `--gpu B200` gives bounds.

Not modelled: instruction cache misses, TLB, L2 slices, DRAM pages, clock changes, divergence inside a warp, atomics, TMA.

Needs gcc, no GPU, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

from benchmarks.predict.run import main

if __name__ == '__main__':
    raise SystemExit(main())
