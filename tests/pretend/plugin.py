"""The suite on the pretend device: `pytest -p offgpu.pretend.plugin -p tests.pretend.plugin --device cuda`.

With PRETEND_FAST=1 Longhorn's own kernels run by Numba on the device's memory, ten times as fast as interpreted ones; fla's
stay interpreted. Programs that a test starts do the same: PRETEND_IMPORT names this module.
"""

from __future__ import annotations

import functools
import os

from offgpu import pretend

FAST = os.environ.get('PRETEND_FAST') == '1'


def use_numba(backend) -> None:
    for name in ('longhorn_fwd', 'longhorn_bwd'):
        setattr(backend, name, functools.wraps(getattr(backend, name))(run_numba(name)))


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


os.environ['PRETEND_IMPORT'] = 'tests.pretend.plugin'
pretend.after_import('benchmarks.measure.timing', measure_small)
if FAST:
    pretend.after_import('fla_longhorn.ops.triton', use_numba)
