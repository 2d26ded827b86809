"""What is told: device and versions, and a table of the errors."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version as package_version

import torch

import fla_longhorn
from fla_longhorn.ops.backend import select_backend
from fla_longhorn.requirements import REQUIREMENTS, installed_version
from fla_longhorn.selfcheck.compare import BOUNDS, Result


def describe(device: torch.device) -> dict[str, str]:
    """Device, backend and versions: what a report of a wrong kernel has to name."""
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


class Table:
    """A line for each op, update and dtype: with rich where it is installed, else in plain text."""

    COLUMNS = ('op', 'update', 'dtype', 'cases', 'outputs', 'gradients', '')

    def __init__(self, results: list[Result]) -> None:
        groups: dict[tuple[str, str, str], list[Result]] = {}
        for result in results:
            groups.setdefault((result.op, result.update, result.dtype), []).append(result)
        self.rows = [
            self.row(op, update, dtype, group)
            for (op, update, dtype), group in sorted(groups.items(), key=lambda item: item[0][2] != 'float32')
        ]

    @staticmethod
    def row(op: str, kind: str, dtype: str, group: list[Result]) -> tuple[str, ...]:
        cells = []
        for outputs, bound in zip((True, False), BOUNDS[dtype], strict=True):
            errors = [error for result in group if (error := result.worst(outputs)) is not None]
            cells.append(f'{max(errors):.1e} / {bound:.0e}' if errors else '-')
        wrong = sum(not result.ok for result in group)
        return op, kind, dtype, str(len(group)), *cells, f'{wrong} wrong' if wrong else 'ok'

    def print(self) -> None:
        try:
            from rich.console import Console
            from rich.table import Table as RichTable
        except ImportError:
            self.print_plain()
            return
        table = RichTable()
        for name in self.COLUMNS:
            table.add_column(name, no_wrap=True)
        for row in self.rows:
            table.add_row(*row, style='red' if row[-1] != 'ok' else None)
        Console(width=None if sys.stdout.isatty() else 120).print(table)

    def print_plain(self) -> None:
        widths = [max(len(row[i]) for row in (self.COLUMNS, *self.rows)) for i in range(len(self.COLUMNS))]
        for row in (self.COLUMNS, *self.rows):
            print('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
