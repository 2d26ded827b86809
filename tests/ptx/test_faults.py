"""Faults planted in the project's kernels are found: barriers taken out, masks dropped, scratch that nobody wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from offgpu.emulator import Emulator, Launch
from tests.ptx.calls import Call, fast
from tests.ptx.execute import execute
from tests.ptx.faults import BARRIER, MASK, STORE, Fault, Kind, Recording, planted, record

pytestmark = [pytest.mark.xdist_group('ptx plain'), pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])]


def plain(exact: bool) -> Call:
    """The plain call of `fast` with fewer tokens, for which nothing compiles anew."""
    [call] = [call for call in fast() if call.name == 'plain' and call.exact == exact]
    return replace(call, case=replace(call.case, T=19 if exact else 9))


@cache
def recordings(exact: bool) -> list[Recording]:
    return record(plain(exact))


def outcomes(exact: bool, kind: Kind, most: int = 30) -> list[Fault]:
    """Of every line that the fault can befall, in the kernels with the fewest such lines: `most` in all, or one kernel."""
    ptx = {x.launch.name: x.launch.ptx for x in recordings(exact)}
    lines = {name: sum(bool(re.match(kind.lines, line)) for line in ptx[name].splitlines()) for name in ptx}
    faults: list[Fault] = []
    for kernel in sorted((name for name in lines if lines[name]), key=lambda name: lines[name]):
        if not faults or len(faults) + lines[kernel] <= most:
            faults += planted(recordings(exact), kind, kernel)
    return faults


def test_missing_barriers(exact):
    """Some order nothing: a loop that runs once needs fewer, and the compiler puts in more than it must."""
    faults = outcomes(exact, BARRIER)
    found = [fault for fault in faults if fault.found]
    assert len(found) > len(faults) // 2, faults
    assert all('race' in kind or 'intra-warp' in kind for fault in found for kind in fault.kinds)


def test_dropped_masks(exact):
    faults = outcomes(exact, MASK)
    assert len([fault for fault in faults if fault.found]) > len(faults) // 2, faults
    # what changes a result is found
    assert all(fault.found for fault in faults if not fault.same)


@dataclass
class WithoutStores(Emulator):
    """Leaves the global stores of one kernel out."""

    kernel: str = ''

    def launch(self, launch: Launch) -> None:
        if launch.name == self.kernel:
            lines = (STORE.change(line) if re.match(STORE.lines, line) else line for line in launch.ptx.splitlines())
            launch = replace(launch, ptx='\n'.join(lines))
        super().launch(launch)


def test_unwritten_scratch(exact):
    """What a kernel leaves unwritten is found where another one reads it, or is a NaN in a result; the first one's is read."""
    kernels = list(dict.fromkeys(x.launch.name for x in recordings(exact)))
    for kernel in kernels:
        emulator = WithoutStores(kernel=kernel)
        results, _ = execute(plain(exact), emulator)
        read = any(x.kind == 'uninitialised read' and x.kernel != kernel for x in emulator.findings)
        assert read or kernel != kernels[0] and not all(torch.isfinite(x).all() for x in results.values()), kernel
