"""The report: device and versions, tables of errors and of times."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version as package_version

import torch

import fla_longhorn
from fla_longhorn.ops.backend import select_backend
from fla_longhorn.requirements import REQUIREMENTS, installed_version
from fla_longhorn.selfcheck.compare import BOUNDS, OUTPUTS, Result


def describe(device: torch.device) -> dict[str, str]:
    """Device, backend and versions."""
    about = {'device': str(device), 'hardware': hardware(device)}
    about['backend'] = select_backend(device).__name__.rsplit('.', 1)[-1]
    about['platform'] = platform.platform()
    about['python'] = platform.python_version()
    about['fla-longhorn'] = fla_longhorn.__version__
    about.update({name: str(installed_version(name)) for name in REQUIREMENTS})
    if about['backend'] == 'numba':
        about['numba'] = package_version('numba')
    if device.type == 'cuda':
        about['runtime'] = f'HIP {torch.version.hip}' if torch.version.hip else f'CUDA {torch.version.cuda}'
        about['capability'] = '.'.join(map(str, torch.cuda.get_device_capability(device)))
    if os.environ.get('TRITON_INTERPRET') == '1':
        about['triton'] += ', interpreting'
    return about


def hardware(device: torch.device) -> str:
    if device.type == 'cpu':
        return f'{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads'
    get_name = getattr(getattr(torch, device.type, None), 'get_device_name', None)
    return device.type if get_name is None else get_name(device)


def error_table(results: list[Result]) -> str:
    """A line for each op, update and dtype: the worst error of all cases beside its bound."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in sorted(results, key=lambda result: result.dtype != 'float32'):
        groups.setdefault((result.op, result.update, result.dtype), []).append(result)
    rows: list[tuple[str, ...]] = [('op', 'update', 'dtype', 'cases', 'outputs', 'gradients', '')]
    for names, group in groups.items():
        cells = []
        for outputs, bound in zip((True, False), BOUNDS[names[-1]], strict=True):
            errors = [error for x in group for name, error in x.errors.items() if (name in OUTPUTS) == outputs]
            cells.append(f'{max(errors):.1e} / {bound:.0e}' if errors else '-')
        wrong = sum(not result.ok for result in group)
        rows.append((*names, str(len(group)), *cells, f'{wrong} wrong' if wrong else 'ok'))
    return table(rows)


def table(rows: list[tuple[str, ...]]) -> str:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
