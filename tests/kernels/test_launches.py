"""What the operators hand to Triton launches on a GPU: rehearsed with `launches.py` in a process of its own, without one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.launches import CALLS

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / 'fla_longhorn' / 'ops' / 'triton'


def rehearse(*args: str) -> list[dict]:
    """The outcomes; not under `TRITON_INTERPRET`, whose kernels don't compile."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    process = subprocess.run(
        [sys.executable, '-W', 'ignore', '-m', 'benchmarks.kernels.launches', *args], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )
    assert process.stdout, process.stderr[-2000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


# (calls, depth): all pairs of options as far as types tell, a few down to machine code, large sizes as far as the grids
@pytest.mark.parametrize(('calls', 'depth'), [
    pytest.param('options', 'types', marks=pytest.mark.xdist_group('launches of all options')),
    pytest.param('few', 'code', marks=pytest.mark.xdist_group('launches of a few')),
    pytest.param('sizes', 'launch', marks=pytest.mark.xdist_group('launches of large sizes')),
    pytest.param('exact sizes', 'launch', marks=pytest.mark.xdist_group('launches of large sizes')),
])
def test_launches(calls, depth):
    outcomes = rehearse('--calls', calls, '--depth', depth)
    assert [x['call'] for x in outcomes] == [str(call) for call in CALLS[calls]()]
    assert not {x['call']: x['error'] for x in outcomes if x['error']}
    assert all(x['launches'] for x in outcomes)


WRONG = """
import torch, triton
import triton.language as tl
from benchmarks.kernels.absent_device import SHARED_MEMORY
from benchmarks.kernels.launches import rehearsal

SHARED_MEMORY['sm_80'] = 256

@triton.jit
def kernel(x, n, B: tl.constexpr, SHARED: tl.constexpr):
    o = tl.arange(0, B)
    if SHARED:
        y = tl.load(x + o[:, None] * B + o[None, :])
        tl.store(x + o[:, None] * B + o[None, :], tl.dot(y, y).to(y.dtype))
    else:
        tl.store(x + o, n)

x = torch.empty(8, dtype=torch.float16, device='meta')
for grid, arguments, B, shared in (
    ((1,), (x, 1), 16, False), ((1, 1, 65536), (x, 1), 16, False), ((0,), (x, 1), 16, False), ((1,), (x, 1), 15, False),
    ((1,), (x, None), 16, False), ((1,), (x, 1), 32, True),
):
    with rehearsal('sm_80', 'code') as launches:
        try:
            kernel[grid](*arguments, B=B, SHARED=shared, num_warps=1)
            print('ok', launches[0]['grid'])
        except Exception as error:
            print(type(error).__name__, str(error.__cause__ or error).replace(chr(10), ' '))
"""


def test_wrong_launches_are_found(tmp_path):
    """A grid beyond the limits or empty, a kernel that doesn't compile, a missing number, too much shared memory."""
    (tmp_path / 'wrong.py').write_text(WRONG)
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'} | {'PYTHONPATH': str(ROOT)}
    process = subprocess.run(
        [sys.executable, '-W', 'ignore', tmp_path / 'wrong.py'], env=environment, capture_output=True, text=True, check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    right, high, empty, odd, missing, large = process.stdout.splitlines()
    assert right == 'ok [1, 1, 1]'
    assert 'grid.z = 65536' in high
    assert 'grid.x = 0' in empty
    assert 'power of 2' in odd
    assert missing.startswith('CompilationError') and large.startswith('OutOfResources'), (missing, large)


@pytest.mark.parametrize('path', sorted(KERNELS.rglob('*.py')), ids=lambda path: str(path.relative_to(KERNELS)))
def test_no_kernel_unpacks_nested_tuples(path):
    """Which Triton 3.6 fails on when it looks for what a kernel depends on."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and any('triton.jit' in ast.unparse(x) for x in function.decorator_list):
            targets = [target for node in ast.walk(function) if isinstance(node, ast.Assign) for target in node.targets]
            tuples = [target for target in targets if isinstance(target, ast.Tuple)]
            nested = [ast.unparse(target) for target in tuples if any(isinstance(x, ast.Tuple) for x in target.elts)]
            assert not nested, (function.name, nested)
