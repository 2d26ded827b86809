"""The public operators through the compiled kernels: right results, no race, nothing read that nobody wrote."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest

import fla_longhorn
from offgpu.emulator import Emulator
from offgpu.launches import rehearsal
from tests.ptx.calls import Call, fast
from tests.ptx.execute import execute, run_call

KERNELS = Path(fla_longhorn.__file__).parent / 'ops' / 'triton'


# these compile longest, and launch no kernel that others don't
SLOW = ('groups', 'packed')


def marked(call: Call):
    return pytest.param(call, marks=[pytest.mark.slow] if call.name in SLOW else [], id=str(call))


@pytest.mark.parametrize('call', map(marked, fast()))
def test_calls(call):
    run_call(call)


def kernels_of_the_package() -> set[str]:
    """Functions for a GPU that no other one calls: those that are launched."""
    functions, called = set(), set()
    for path in KERNELS.rglob('*.py'):
        for function in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(function, ast.FunctionDef) and any('triton.jit' in ast.unparse(x) for x in function.decorator_list):
                functions.add(function.name)
                called |= {x.func.id for x in ast.walk(function) if isinstance(x, ast.Call) and isinstance(x.func, ast.Name)}
    return functions - called


class Rehearsal(Emulator):
    """Names the kernels that are launched, and compiles none of them."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.names: set[str] = set()

    @contextmanager
    def active(self):
        with rehearsal(self.target, 'launch') as launches:
            yield self
            self.names = {x.kernel for x in launches}


def test_every_kernel_is_executed():
    """A new kernel needs a call in `calls.fast` that launches it, and is not slow."""
    launched = set()
    for call in fast():
        if call.name in SLOW:
            continue
        emulator = Rehearsal(call.target)
        execute(call, emulator)
        launched |= emulator.names
    assert kernels_of_the_package() == launched
