"""What the timing model assumes of a GPU, with sources. Cycles are of the SM clock; a sub-partition is a quarter of an SM.

Sources: [PG] CUDA C++ programming guide, arithmetic throughput by compute capability; [WP] NVIDIA's architecture white papers
and data sheets (A100, H100); [L24] Luo et al. 2024, arXiv 2402.13499 and 2501.12084 (microbenchmarks of A100 and H100); [A22]
Abdelkhalik et al. 2022, arXiv 2208.11174 (A100); [H25] Huerta et al. 2025, arXiv 2503.20481 (issue logic, register file,
memory pipeline); [CC] chipsandcheese.com, L2 and bandwidth; [SASS] ptxas' own stall counts, which encode what NVIDIA's
compiler knows; [T] timings of kernels that were predicted beside them (`python -m benchmarks calibrate`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

KIB, MIB = 1024, 1024**2


@dataclass
class Machine:
    """One GPU; the defaults are those of an H100 (SXM)."""

    name: str = 'H100'
    capability: int = 90
    multiprocessors: int = 132
    # at which kernels like these run [T: state updates of 256 to 1024 heads, which issue bounds]; boost is 1.98
    clock: float = 1.755e9
    # bytes a second that kernels achieve of the 3.35e12 [WP] [T: tiles of linear attention 2.8, updates of a state 2.5 to 2.8]
    dram_bandwidth: float = 2.8e12
    l2_size: int = 50 * MIB
    # bytes a clock from L2 into an SM: 64 is the port; all SMs together get about 5.5 to 7 TB/s [CC] -> 24 to 30
    l2_bytes_per_clock: float = 28.0

    # latency of loads, issue to release of the scoreboard [L24: 40.7, 263]; DRAM [T: a recurrence that waits for one load a
    # token takes 460 ns, 44 of them arithmetic; 690 cycles idle on a GH200 by github.com/markdewing/AI_kernels]
    l1_hit: int = 38
    l2_hit: int = 265
    dram: int = 730
    shared_load: int = 29
    ldsm: int = 33
    shuffle: int = 24
    # MUFU [A22: 18 to 23], conversions
    mufu: int = 22
    convert: int = 22
    special_register: int = 24
    constant_load: int = 36
    uniform: int = 12
    # other instructions with a scoreboard: integer ones of variable latency [SASS]
    other: int = 14
    # a store's operands are read [H25: about 10 to 20]
    store_read: int = 14
    # last arrival at a barrier to the others' next instruction
    barrier: int = 24
    # taken branch to the next instruction
    branch: int = 8
    # instruction fetch [T: eight passes on an H200]: lines of 8 instructions (128 bytes) in a scheduler's own cache, of which
    # the one used longest ago goes (bracket: 98 to 137, by loops of 779 that ran as predicted and of 1,098 that did not; 0:
    # none misses), and cycles until one that is missing can issue (35 by the passes of K = 16 alone, 39 by those of K = 64;
    # published kernels of more warps want less. 12 cycles a line on a port that the four schedulers share, two lines ahead,
    # fit nearly as well)
    l0_lines: int = 112
    l0_miss: int = 32

    # cycles that an instruction keeps its pipe of a sub-partition [PG: lanes a clock and SM: FFMA 128, IMAD/IADD3/LOP3 64,
    # MUFU 16, conversions 64; SHFL and loads 32]
    occupancy: dict = field(default_factory=lambda: {
        'fma': 2, 'fmaheavy': 2, 'alu': 2, 'xu': 8, 'convert': 2, 'uniform': 2, 'branch': 2, 'fp64': 2, 'mio': 4, 'misc': 1,
    })
    # memory instructions that a sub-partition's queue holds beyond the one in progress [H25: 4]
    mio_queue: int = 4
    # HMMA by its shape for 16-bit operands: m16n8k16 at 1024 FMA a clock and SM, which mma.sync gets of Hopper's 2048
    # [L24: mma.sync reaches 62% of peak], and which is all of an A100's [WP]
    hmma: dict = field(default_factory=lambda: {'16816': 8, '1688': 4, '1684': 4, '16832': 8})
    # FMA a clock and SM of wgmma with 16-bit operands; latency of a small one beyond its occupancy [L24]
    wgmma_rate: int = 2048
    wgmma_latency: int = 34
    wgmma_min: int = 16
    # register file: each of two banks reads one register of a warp a cycle, operands within three cycles [H25]; 0 turns it off
    bank_window: int = 3
    # lines of 128 bytes that L1 keeps beside shared memory
    l1_lines: int = 1400
    block_launch: int = 60
    # seconds from the end of a kernel to the first instruction of the next one [T: the smallest state updates,
    # 2.16 us for 0.7]
    launch_seconds: float = 1.5e-6

    registers: int = 65536
    shared_bytes: int = 227 * KIB
    max_warps: int = 64
    max_blocks: int = 32


def h100() -> Machine:
    return Machine()


def h200() -> Machine:
    """The same processor; 4.3 TB/s were measured for a copy. 1.98 GHz is the boost clock, held unless power limits it."""
    return Machine(name='H200', clock=1.98e9, dram_bandwidth=4.3e12)


def a100() -> Machine:
    """A100 (SXM, 40 GB).

    [WP]: 108 SMs, 1.41 GHz, 40 MB of L2, 164 KB of shared memory, 1.555 TB/s, of which a copy gets about 90%; latencies [L24:
    L1 37.9, shared 29.0, L2 261.5, DRAM 466.3 idle]. Its instruction cache is taken to be Hopper's.
    """
    return Machine(
        name='A100', capability=80, multiprocessors=108, clock=1.41e9, dram_bandwidth=1.4e12, l2_size=40 * MIB, l1_hit=38,
        l2_hit=262, dram=500, shared_load=29, shared_bytes=164 * KIB - KIB, l1_lines=1100,
    )


MACHINES = {'H100': h100, 'H200': h200, 'A100': a100}


def changed(machine: Machine, changes: Iterable[str]) -> Machine:
    """With other constants, each as FIELD=VALUE."""
    for change in changes:
        name, _, value = change.partition('=')
        if not isinstance(before := getattr(machine, name, None), (int, float)):
            raise ValueError(f'set takes a number of offgpu.predict.machine.Machine as FIELD=VALUE, got {change}')
        machine = replace(machine, **{name: type(before)(float(value))})
    return machine
