"""The suite on the pretend device: `pytest -p offgpu.pretend.plugin -p tests.pretend.plugin --device cuda`.

With PRETEND_FAST=1 Longhorn's own kernels run by Numba on the device's memory, ten times as fast as interpreted ones; fla's
stay interpreted. Programs that a test starts do the same: PRETEND_IMPORT names this module.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from offgpu import pretend
from tests.devices import is_within

ROOT = Path(__file__).parents[2]
# what does not run here, by path or by name, and why; what a GPU does not run either is named elsewhere
LEFT_OUT = {
    'tests/kernels': 'compiles kernels, in whose place the interpreter stands',
    'tests/contrib/test_lm_eval_tasks.py': 'a trained model in interpreted kernels takes an hour',
    'tests/contrib/test_lm_eval.py': 'so does this one',
    'tests/offgpu': 'other stand-ins for a GPU',
    'tests/pretend': 'of the device itself, run without --device',
    'tests/ops/test_longhorn.py::test_too_large_keys': 'Numba stands in for the kernels, and gives NaN',
    'tests/ptx': 'executes compiled kernels',
    **dict.fromkeys((
        'tests/torch_compile/test_model.py::test_inductor',
        'tests/torch_compile/test_pool.py::test_a_view_is_written_through[diagonal-inductor]',
        'tests/torch_compile/test_pool.py::test_a_view_is_written_through[exact-inductor]',
    ), 'Inductor compiles kernels, in whose place the interpreter stands'),
}
FAST = os.environ.get('PRETEND_FAST') == '1'


def use_numba(backend) -> None:
    for name in ('longhorn_fwd', 'longhorn_bwd'):
        setattr(backend, name, functools.wraps(getattr(backend, name))(run_numba(name)))
    # which arranges saved states as the operator returns them
    backend.view_states = lambda states, args: states


def run_numba(name: str):
    """`longhorn_fwd` or `longhorn_bwd` of the Triton backend, by the one for the CPU; a launch as Triton's."""
    def run(*args, **kwargs):
        import torch

        from fla_longhorn.ops import numba
        from offgpu.pretend import launches

        def host(x):
            if isinstance(x, torch.Tensor):
                if not x.is_cuda:
                    raise ValueError(f'Pointer argument cannot be accessed from Triton (cpu tensor?): {name}')
                return torch.ops.pretend.host(x)
            return x._replace(**{key: host(value) for key, value in x._asdict().items()}) if hasattr(x, '_asdict') else x

        on_host = functools.partial(
            torch.no_grad()(getattr(numba, name)), *map(host, args), **{key: host(value) for key, value in kwargs.items()})
        results = on_host()

        def again() -> None:
            for result, new in zip(results, on_host(), strict=True):
                result.copy_(new)

        launches.note(name, None, again)
        with torch.no_grad():
            return tuple(map(torch.ops.pretend.device, results))

    return run


def measure_small(timing) -> None:
    """A GPU's sizes, which it takes milliseconds for, take minutes here."""
    rates = timing.device_rates
    timing.device_rates = lambda device: rates(type(device)('cpu'))


def why_not(test: str) -> str | None:
    """Why this test, file or folder is left out."""
    return next((why for name, why in LEFT_OUT.items() if is_within(test, name) or test.startswith(f'{name}[')), None)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.getoption('--device') == 'cpu':
        return []
    return ['left out on the pretend device:', *(f'  {name}: {why}' for name, why in LEFT_OUT.items())]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not imported either: modules that compile kernels can't be."""
    if config.getoption('--device') != 'cpu' and collection_path.is_relative_to(ROOT):
        return why_not(collection_path.relative_to(ROOT).as_posix()) is not None or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption('--device') != 'cpu':
        for item in items:
            if why := why_not(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f'on the pretend device: {why}'))


os.environ['PRETEND_IMPORT'] = 'tests.pretend.plugin'
pretend.after_import('benchmarks.measure.timing', measure_small)
if FAST:
    pretend.after_import('fla_longhorn.ops.triton', use_numba)
