"""What the operators hand to Triton launches on a GPU: rehearsed with `launches.py`, without one."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.compiler import max_shared_mem

from benchmarks.kernels.launches import CALLS, run_call
from fla_longhorn.ops.triton.device import make_card
from fla_longhorn.ops.triton.exact import configs
from fla_longhorn.ops.triton.launch import LaunchKey
from offgpu.absent_device import DEVICES
from offgpu.launches import rehearsal

KERNELS = Path(__file__).parents[4] / 'fla_longhorn' / 'ops' / 'triton'


# all pairs of options as far as types tell, large sizes as far as the grids; `test_compiled.py` goes down to machine code
@pytest.mark.parametrize(('calls', 'depth'), [
    ('options', 'launch'), ('sizes', 'launch'), ('exact sizes', 'launch'),
    pytest.param('options', 'types', marks=pytest.mark.slow),
])
def test_launches(calls, depth):
    outcomes = [run_call(call, 'sm_90', depth) for call in CALLS[calls]()]
    assert not {x.call: x.error for x in outcomes if x.error}
    assert all(x.launches for x in outcomes)


# of lanes that must have the same sums
UNFUSED = {'longhorn_step_kernel', 'fused_recurrent_longhorn_exact_fwd_kernel'}


def test_products_and_sums_are_fused_whatever_is_tritons_choice(monkeypatch):
    monkeypatch.setenv('TRITON_DEFAULT_FP_FUSION', '0')
    launches = [x for call in CALLS['few']() for x in run_call(call, 'sm_90', 'launch').launches]
    assert len({x['kernel'] for x in launches}) > 10
    assert {x['kernel'] for x in launches if not x['enable_fp_fusion']} <= UNFUSED


def test_no_copies_ahead_of_products_without_a_fence(monkeypatch):
    """Triton 3.6 on Hopper; `python -m packages.offgpu.tests.ptx` with that version finds what would be read too early."""
    monkeypatch.setattr(configs, 'ASYNC_COPIES', False)
    cards = {target: make_card(device.target, device.properties) for target, device in DEVICES.items()}
    stages = {
        (target, K): configs.for_products(LaunchKey(K, 64, 'bf16', card), False).num_stages
        for target, card in cards.items() for K in (16, 32, 64, 128)
    }
    assert [stages['sm_90', K] for K in (16, 32, 64, 128)] == [1, None, 1, 1]
    # no warp groups before, and none at K = 16 after
    assert stages['sm_80', 64] is stages['sm_120', 64] is stages['sm_100', 16] is None


@triton.jit
def wrong_kernel(x, n, B: tl.constexpr, SHARED: tl.constexpr):
    o = tl.arange(0, B)
    if SHARED:
        y = tl.load(x + o[:, None] * B + o[None, :])
        tl.store(x + o[:, None] * B + o[None, :], tl.dot(y, y).to(y.dtype))
    else:
        tl.store(x + o, n)


@pytest.fixture
def little_shared_memory(monkeypatch):
    """Of an A100, which Triton asks for once a process."""
    monkeypatch.setitem(DEVICES, 'sm_80', replace(DEVICES['sm_80'], shared_memory=256))
    max_shared_mem.cache_clear()
    yield
    max_shared_mem.cache_clear()


@pytest.mark.parametrize(('grid', 'n', 'B', 'shared', 'error'), [
    ((1, 1, 65536), 1, 16, False, 'grid.z = 65536'),
    ((0,), 1, 16, False, 'grid.x = 0'),
    ((1,), 1, 15, False, 'power of 2'),
    ((1,), None, 16, False, 'CompilationError'),
    ((1,), 1, 32, True, 'OutOfResources'),
], ids=['a high grid', 'an empty grid', 'an odd block', 'no number', 'too much shared memory'])
def test_wrong_launches_are_found(little_shared_memory, grid, n, B, shared, error):
    x = torch.empty(8, dtype=torch.float16, device='meta')
    with rehearsal('sm_80', 'code') as launches:
        wrong_kernel[(1,)](x, 1, B=16, SHARED=False, num_warps=1)
        assert [launch.grid for launch in launches] == [[1, 1, 1]]
        with pytest.raises(Exception) as raised:
            wrong_kernel[grid](x, n, B=B, SHARED=shared, num_warps=1)
    assert error in f'{type(raised.value).__name__}: {raised.value.__cause__ or raised.value}'


@pytest.mark.parametrize('path', sorted(KERNELS.rglob('*.py')), ids=lambda path: str(path.relative_to(KERNELS)))
def test_no_kernel_unpacks_nested_tuples(path):
    """Which Triton 3.6 fails on when it looks for what a kernel depends on."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and any('triton.jit' in ast.unparse(x) for x in function.decorator_list):
            targets = [target for node in ast.walk(function) if isinstance(node, ast.Assign) for target in node.targets]
            tuples = [target for target in targets if isinstance(target, ast.Tuple)]
            nested = [ast.unparse(target) for target in tuples if any(isinstance(x, ast.Tuple) for x in target.elts)]
            assert not nested, (function.name, nested)
