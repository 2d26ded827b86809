"""The emulator itself: small kernels come out right, and wrong ones are found."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from offgpu.emulator import Emulator, Launch, formats
from tests.offgpu.known import KERNELS, check


@pytest.mark.parametrize('name', list(KERNELS))
def test_small_kernels(name):
    assert check(name, 'sm_90', 'together') == ''


@pytest.mark.parametrize('bits', [32, 64])
@pytest.mark.parametrize(('position', 'length'), [(0, 5), (3, 7), (0, 59), (20, 60), (31, 1), (4, 0)])
def test_bit_fields(bits, position, length):
    """Those of two's complement: as many bits as the word has from this position on, the last one a sign."""
    a = [0, 1, 2 ** bits - 1, 2 ** (bits - 1), 0x5a5a5a5a5a5a5a5a % 2 ** bits, 0x8000000180000001 % 2 ** bits]
    width = min(length, bits - position)
    fields = [(x >> position) % 2 ** width for x in a]
    words = np.array(a, np.uint32 if bits == 32 else np.uint64)
    assert formats.bit_field(words, position, length, False).tolist() == fields
    signed = [(x - 2 ** width if width and x >> (width - 1) else x) % 2 ** bits for x in fields]
    assert formats.bit_field(words, position, length, True).tolist() == signed


@pytest.mark.parametrize('order', ['first', 'last'])
@pytest.mark.parametrize('name', ['matmul(32, 64, 64, bfloat16, \'tf32\', 4)', 'column_sum(200, 4)'])
def test_orders_of_warps(name, order):
    assert check(name, 'sm_90', order) == ''


@pytest.mark.parametrize('name', ['matmul(32, 64, 64, bfloat16, \'tf32\', 4)', 'softmax(1000, float32, 4)'])
def test_ampere(name):
    assert check(name, 'sm_80', 'together') == ''


@dataclass
class Without(Emulator):
    """Leaves the lines with this text out."""

    text: str = ''

    def launch(self, launch: Launch) -> None:
        lines = launch.ptx.splitlines()
        kept = [line for line in lines if self.text not in line]
        assert len(kept) < len(lines)
        super().launch(replace(launch, ptx='\n'.join(kept)))


GROUPS = 'operands(64, 64, 64, bfloat16, (False, True), False, 4)'
COPIES = "matmul(32, 64, 64, bfloat16, 'tf32', 4)"


@pytest.mark.parametrize(('name', 'target', 'text', 'kind'), [
    (GROUPS, 'sm_90', 'fence.proxy.async', 'wgmma reads a store without a proxy fence between'),
    (GROUPS, 'sm_90', 'wgmma.wait_group', 'a register of wgmma is used before the wait'),
    (COPIES, 'sm_80', 'bar.sync', 'race between warps: read after write'),
    (COPIES, 'sm_80', 'cp.async.wait', 'cp.async never waited for'),
])
def test_missing_waits(name, target, text, kind):
    emulator = Without(target, text=text)
    with emulator.active():
        KERNELS[name]()
    assert kind in {x.kind for x in emulator.findings}
