"""The least work of any implementation of a pass: its bytes, and the best known algorithm's instructions.

Bytes, of one (token, channel), 16-bit inputs: each input and output once, and the saved states once, which are K entries in
float32 for each `checkpoint_interval(K)` tokens.

Instructions, of a lane, for one (token, channel):

- diagonal, each of the K entries of a state: the decay `1 - eps k^2`, the update with its product, and the output's sum: 4.
  Back: the state again and the gated output's sum (4), `G + q dy`, the decay and its product (3), `m = G (v / 2 - k S)` (2),
  the two sums over the entries (2): 11. The sums over the channels for dq and dk are the tensor cores' (2 FMA).
- exact: products with states and Gram matrices on tensor cores (`3 K + C` FMA for a chunk of C = 16 tokens, `9 K + 5 C`
  back), and one substitution of `(C - 1) / 2` FMA forward, two of them back.
- both, of elementwise work (`ELEMENTWISE`): loads and stores of two values a word, conversions, the step size, the gate and
  their derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.predict.calls import Shape
from fla_longhorn.ops.checkpoints import checkpoint_interval
from offgpu.predict.machine import Machine

CHUNK = 16
HALF = 2
# instructions: loads 1.5, conversions 3, step size 4, its product with v 1, D 1, gate 6, packing and storing o 1;
# plain: without z (0.5 + 1 + 6), D and the logistic function (2)
# back: loads 2, conversions 4, step size 4, gate 6, dz 5, dv 2, deps 2, dbeta 3 and its slope 2, dD 1, packing and storing 3
ELEMENTWISE = {('fwd', False): 17.5, ('bwd', False): 34.0, ('fwd', True): 7.0, ('bwd', True): 17.5}
# lanes a clock and SM that issue, and those of the special functions
LANES, SPECIAL_LANES = 128, 16
# Mamba-1's scan (state-spaces/mamba, csrc/selective_scan/selective_scan_{fwd,bwd}_kernel.cuh): instructions of an entry of a
# state, and of the rest. Forward, an entry: delta A and its exp2, B delta u, the converted B and C, the product and two FMA of
# cub's two passes over a thread's tokens, the output's FMA. Back, an entry: the converted B and C, delta A and its exp2,
# B delta u, C dout, two scans of 3, nine for the sums du, ddelta and dA and for dB and dC, and dB and dC through shared memory
# (4) and added in L2 (2). The rest: loads and stores, conversions, softplus, gate and their derivatives. Left out are shuffles
# between threads, barriers, and what L2 takes for additions.
SCAN = {'fwd': (9, 20), 'bwd': (27, 38)}
SCAN_ENTRY_SPECIAL = 1


@dataclass(frozen=True)
class Floor:
    """Bytes and FMA per (token, channel), and the least seconds that they take."""

    bytes: float
    instructions: float
    tensor_fma: float
    dram_seconds: float
    issue_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.dram_seconds, self.issue_seconds)


def needed_bytes(s: Shape, direction: str, plain: bool = False) -> float:
    """Bytes per (token, channel): forward v, beta, o (and z); backward v, beta, do, dv, dbeta (and z, dz); q, k and states."""
    channel = {'fwd': 3, 'bwd': 5}[direction] + (0 if plain else {'fwd': 1, 'bwd': 2}[direction])
    keys = {'fwd': 2, 'bwd': 4}[direction] * s.K / s.V
    return HALF * (channel + keys) + 4 * s.K / checkpoint_interval(s.K)


def floor_of(name: str, s: Shape, machine: Machine, plain: bool = False) -> Floor:
    """The floors of a pass of :data:`benchmarks.predict.calls.PASSES`."""
    update, direction = name.split('_')
    if update == 'diagonal':
        instructions, tensor = (4 * s.K, 0) if direction == 'fwd' else (11 * s.K, 2 * s.K)
    else:
        substitution = (CHUNK - 1) / 2
        forward, back = (substitution, 3 * s.K + CHUNK), (2 * substitution, 9 * s.K + 5 * CHUNK)
        instructions, tensor = forward if direction == 'fwd' else back
    instructions += ELEMENTWISE[direction, plain]
    size = needed_bytes(s, direction, plain)
    work, clocks = s.B * s.T * s.V, machine.multiprocessors * machine.clock
    return Floor(
        size, instructions, tensor, work * size / machine.dram_stream,
        work * max(instructions / LANES, tensor / machine.tensor_rate) / clocks,
    )


def scan_instructions(direction: str, K: int) -> float:
    """Of a lane, for one (token, channel) of Mamba-1's scan with N = K, or as many as take as long as its exponentials."""
    entry, rest = SCAN[direction]
    return max(entry * K + rest, SCAN_ENTRY_SPECIAL * K * LANES / SPECIAL_LANES)
