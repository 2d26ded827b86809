"""The suite on the pretend device: `pytest -p offgpu.pretend.plugin -p packages.offgpu.tests.pretend.plugin --device cuda`.

With PRETEND_FAST=1 Longhorn's own kernels run by Numba on the device's memory, ten times as fast as interpreted ones; with
PRETEND_FAST=2 fla's norms, convolution, activations and losses run by `fla_cpu` too. Programs that a test starts do the same:
PRETEND_IMPORT names this module.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offgpu import pretend
from tests.devices import ON_THE_CPU, why_not

ROOT = Path(__file__).parents[4]
# what does not run here, by path or by name, and why; what a GPU does not run either is named elsewhere
LEFT_OUT = {
    'packages/offgpu/tests/kernels': 'compiles kernels, in whose place the interpreter stands',
    'packages/extras/tests/test_lm_eval_tasks.py': 'a trained model in interpreted kernels takes an hour',
    'tests/ops/test_longhorn.py::test_too_large_keys': 'Numba stands in for the kernels, and gives NaN',
    'tests/integration/quantized/test_quantized.py::test_bitsandbytes': "calls bitsandbytes' own kernels",
    'packages/offgpu/tests/ptx': 'executes compiled kernels',
    **{f'packages/extras/tests/trl/test_grpo.py::test_ratios_of_a_batch_invariant_model_are_one[{form}-torch.bfloat16]':
       'TRL multiplies bfloat16 by an operator that PyTorch has for GPUs alone' for form in ('diagonal', 'exact')},
    **dict.fromkeys((
        'tests/torch_compile/test_aoti.py::test_generates_the_same_tokens',
        'tests/torch_compile/test_model.py::test_inductor',
        'tests/torch_compile/test_pool.py::test_a_view_is_written_through[diagonal-inductor]',
        'tests/torch_compile/test_pool.py::test_a_view_is_written_through[exact-inductor]',
    ), 'Inductor compiles kernels, in whose place the interpreter stands'),
}
FAST = int(os.environ.get('PRETEND_FAST', '0'))


def use_numba(backend) -> None:
    """Longhorn's own kernels by Numba."""
    def by_numba(name: str, *args, **kwargs):
        from fla_longhorn_cpu import backend as numba
        return getattr(numba, name)(*args, **kwargs)

    for name in ('longhorn_fwd', 'longhorn_bwd'):
        original = getattr(backend, name)
        setattr(backend, name, functools.wraps(original)(run_on_host(functools.partial(by_numba, name), name)))
    # which arranges saved states as the operator returns them, and keeps no updates
    backend.view_states = lambda states, args: states
    backend.keeps_updates = lambda args, parallel: False


def use_fla_cpu(_) -> None:
    """fla's norms, convolution, activations and losses by `fla_cpu`, through fla's registry: its kernels are as slow."""
    from fla import backends

    from fla_cpu import MODULES
    from fla_cpu.backend import IMPLEMENTATIONS

    for name in MODULES:
        importlib.import_module(f'fla_cpu.{name}')

    class PretendBackend(backends.BaseBackend):
        backend_type = 'pretend'

    for entry_point, implementation, _ in IMPLEMENTATIONS:
        # the others are made of these: on a device they are fla's
        if not entry_point.__name__.endswith(('_linear', 'fused_linear_cross_entropy_fwd')):
            backends.register(entry_point, backend=PretendBackend, verifier=is_on_device)(
                run_on_host(implementation, entry_point.__name__))


def is_on_device(*args, **kwargs) -> tuple[bool, str | None]:
    tensors = [x for x in (*args, *kwargs.values()) if hasattr(x, 'is_cuda')]
    return bool(tensors) and tensors[0].is_cuda, 'the first tensor is not on the device'


def run_on_host(function: Callable, name: str) -> Callable:
    """`function`, written for the CPU, on the device's memory; a launch as Triton's."""
    def run(*args, **kwargs):
        import torch
        from torch.utils._pytree import tree_leaves, tree_map_only

        from offgpu.pretend import launches

        given: dict[int, tuple] = {}

        def to_host(x: torch.Tensor) -> torch.Tensor:
            """The same memory as a tensor of the CPU."""
            if not x.is_cuda:
                raise ValueError(f'Pointer argument cannot be accessed from Triton (cpu tensor?): {name}')
            host = torch.ops.pretend.host(x)
            given[id(host)] = host, x
            return host

        args, kwargs = tree_map_only(torch.Tensor, to_host, (args, kwargs))
        on_host = functools.partial(torch.no_grad()(function), *args, **kwargs)
        results = on_host()

        def again() -> None:
            for result, new in zip(tree_leaves(results), tree_leaves(on_host()), strict=True):
                if isinstance(result, torch.Tensor) and result is not new:
                    result.copy_(new)

        launches.note(name, None, again)
        with torch.no_grad():
            # what is updated in place comes back as itself
            return tree_map_only(
                torch.Tensor, lambda x: given[id(x)][1] if id(x) in given else torch.ops.pretend.device(x), results)

    return run


def run_backward_here(torch) -> None:
    """In the thread of forward: coverage does not see those that Python did not start."""
    torch.autograd.set_multithreading_enabled(False)


def measure_small(timing) -> None:
    """A GPU's sizes, which it takes milliseconds for, take minutes here."""
    rates = timing.device_rates
    timing.device_rates = lambda device: rates(type(device)('cpu'))


def pytest_configure() -> None:
    # skipped on a device as those that no GPU runs are
    ON_THE_CPU.update(LEFT_OUT)


def pytest_sessionstart() -> None:
    if os.environ.get('COVERAGE_PROCESS_CONFIG'):
        import torch

        run_backward_here(torch)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.getoption('--device') == 'cpu':
        return []
    return ['left out on the pretend device:', *(f'  {name}: {why}' for name, why in LEFT_OUT.items())]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not imported either: modules that compile kernels can't be."""
    if config.getoption('--device') != 'cpu' and collection_path.is_relative_to(ROOT):
        return why_not(collection_path.relative_to(ROOT).as_posix(), LEFT_OUT) is not None or None
    return None


os.environ['PRETEND_IMPORT'] = 'packages.offgpu.tests.pretend.plugin'
# where programs find it, whatever their folder; behind offgpu's own sitecustomize
if str(ROOT) not in (known := os.environ.get('PYTHONPATH', '').split(os.pathsep)):
    os.environ['PYTHONPATH'] = os.pathsep.join([*filter(None, known), str(ROOT)])
pretend.after_import('benchmarks.measure.timing', measure_small)
if FAST > 0:
    pretend.after_import('fla_longhorn.ops.triton', use_numba)
if FAST > 1:
    # where Longhorn is not imported too
    pretend.after_import('fla', use_fla_cpu)
if os.environ.get('COVERAGE_PROCESS_CONFIG'):
    pretend.after_import('torch', run_backward_here)
