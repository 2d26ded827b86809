"""Faults planted in the project's kernels are found: barriers taken out, masks dropped, scratch that nobody wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import pytest

from tests.ptx.calls import Call, fast
from tests.ptx.emulator import Emulator, Launch
from tests.ptx.execute import execute
from tests.ptx.faults import BARRIER, MASK, STORE, Fault, Kind, Recording, planted, record

pytestmark = pytest.mark.xdist_group('ptx plain')


def plain(exact: bool, T: int) -> Call:
    """The plain call of `fast` with other tokens, for which nothing compiles anew."""
    [call] = [call for call in fast() if call.name == 'plain' and call.exact == exact]
    return replace(call, case=replace(call.case, T=T))


@cache
def recordings(exact: bool) -> list[Recording]:
    return record(plain(exact, 19 if exact else 9))


def faults(kernel: str, kind: Kind) -> list[Fault]:
    return list(planted(recordings('exact' in kernel), kind, kernel))


@pytest.mark.parametrize('kernel', [
    'longhorn_bwd_kernel', 'chunk_longhorn_exact_kernel_gram', 'chunk_longhorn_exact_bwd_kernel_qk',
])
def test_missing_barriers(kernel):
    """Some barriers order nothing: a loop that runs once needs fewer, and the compiler puts one more than it must."""
    outcomes = faults(kernel, BARRIER)
    found = [fault for fault in outcomes if fault.found]
    assert len(found) >= max(len(outcomes) // 2, 1), outcomes
    assert all('race' in kind or 'intra-warp' in kind for fault in found for kind in fault.kinds)


@pytest.mark.parametrize('kernel', ['longhorn_prepare_kernel', 'longhorn_reduce_kernel', 'chunk_longhorn_exact_kernel_gram'])
def test_dropped_masks(kernel):
    outcomes = faults(kernel, MASK)
    assert any(fault.found for fault in outcomes), outcomes
    # of what goes wrong nothing is missed
    assert all(fault.found for fault in outcomes if not fault.same)


@dataclass
class WithoutStores(Emulator):
    """Leaves the global stores of one kernel out."""

    kernel: str = ''

    def launch(self, launch: Launch) -> None:
        if launch.name == self.kernel:
            lines = (STORE.change(line) if re.match(STORE.lines, line) else line for line in launch.ptx.splitlines())
            launch = replace(launch, ptx='\n'.join(lines))
        super().launch(launch)


@pytest.mark.parametrize(('kernel', 'reader', 'exact'), [
    ('longhorn_prepare_kernel', 'longhorn_fwd_kernel', False),
    ('longhorn_bwd_kernel', 'longhorn_reduce_kernel', False),
    ('chunk_longhorn_exact_kernel_gram', 'chunk_longhorn_exact_fwd_kernel_o', True),
])
def test_unwritten_scratch(kernel, reader, exact):
    """What one kernel leaves unwritten, the next one must not read."""
    emulator = WithoutStores(kernel=kernel)
    execute(plain(exact, 9), emulator)
    assert ('uninitialised read', reader) in {(x.kind, x.kernel) for x in emulator.findings}
