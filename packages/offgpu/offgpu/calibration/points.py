"""Timings that others published, from `points.csv`, and which of them set constants of the model."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name('points.csv')
# operators that no constant was set by, so that their errors are those of kernels the model has not seen
LEFT_OUT = ('chunk_gla', 'chunk_delta_rule')
# the constants of an H100 that points set: the value, by (kernel, pass), and how
SET_BY: dict[str, tuple[float, tuple[tuple[str, str], ...], str]] = {
    'dram': (730, (('fused_recurrent_hgrn', 'fwd'),),
             '460 ns a token at every length: one load from DRAM, and 78 cycles of arithmetic; a GH200 has 690 cycles idle'),
    'dram_bandwidth': (2.8e12, (('_selective_scan_update_kernel (SSU)', 'decode'), ('chunk_linear_attn', 'fwd')),
                       'tiles and updates in place at 2.5 to 2.8'),
    'launch_seconds': (1.5e-6, (('_selective_scan_update_kernel (SSU)', 'decode'),), '2.16 us for a kernel of 0.7'),
    'clock': (1.755e9, (('_selective_scan_update_kernel (SSU)', 'decode'),), 'issue bounds it at 256 to 1024 heads'),
}


@dataclass(frozen=True)
class Point:
    """A timing on an H100, or an H800, which is one with slower links to others."""

    source: str
    gpu: str
    version: str
    kernel: str
    shape: str
    dtype: str
    direction: str
    ms: float

    @property
    def group(self) -> str:
        return 'left out' if self.kernel in LEFT_OUT else 'fitted'

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of a shape such as `B2_T16384_H16_D128` or `EB8 headdim64`."""
        return {name: int(number) for name, number in re.findall(r'(BLOCK_M|[A-Za-z]+)_?(\d+)', self.shape)}

    @property
    def name(self) -> str:
        return ' '.join([self.source.split(':')[0], self.gpu, self.kernel, self.shape, self.direction])


def read() -> list[Point]:
    with FILE.open(newline='') as file:
        return [Point(*(row[name] for name in (
            'source', 'gpu', 'version', 'kernel', 'shape', 'dtype', 'pass',
        )), float(row['ms'])) for row in csv.DictReader(file)]
