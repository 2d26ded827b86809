"""The public operators through the compiled kernels: right results, no race, nothing read that nobody wrote."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import fla_longhorn
from offgpu.launches import rehearsal
from packages.offgpu.tests.ptx.calls import fast
from packages.offgpu.tests.ptx.execute import execute, run_call
from tests.devices import slow_but

KERNELS = Path(fla_longhorn.__file__).parent / 'ops' / 'triton'


# these compile longest, and `segments` compiles what `rows` does
SLOW = ('decays', 'groups', 'rows')


@pytest.mark.parametrize('call', slow_but((x for x in fast() if x.name not in SLOW), fast()), ids=str)
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


@pytest.mark.slow
def test_every_kernel_is_executed():
    """A new kernel needs a call in `calls.fast` that launches it."""
    launched: set[str] = set()

    @contextmanager
    def active(target: str):
        """In place of an emulator, which compiles."""
        with rehearsal(target, 'launch') as launches:
            yield
            launched.update(x.kernel for x in launches)

    for call in fast():
        execute(call, SimpleNamespace(active=partial(active, call.target)))
    assert kernels_of_the_package() == launched
