"""The command line, and what it prints: device and versions, and a table of errors."""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

import torch

import fla_longhorn
from fla_longhorn.ops import backends
from fla_longhorn.ops.backends import BACKENDS, select_backend
from fla_longhorn.requirements import REQUIREMENTS, installed_version
from fla_longhorn.selfcheck.case import CASES, DTYPES, OPS, cases_of
from fla_longhorn.selfcheck.compare import BOUNDS, OUTPUTS, Result, run_checks
from fla_longhorn.selfcheck.times import measure_passes

# of a report: after so many, no case begins
REPORT_SECONDS = 180


def main(args: list[str] | None = None) -> int:
    """Run the checks and print a table.

    Returns 0 if all is right, 1 if a case is wrong, 3 if none is but cases were not reached; exits with 2 for a wrong option.
    """
    options = parse_args(args)
    started = time.time()
    about = describe(options.device)
    lines = [f'{name:24}{value}' for name, value in about.items()]
    print(*lines, sep='\n', flush=True)

    # an older GPU has no bfloat16
    has_bfloat16 = options.device.type != 'cuda' or torch.cuda.is_bf16_supported(including_emulation=False)
    dtypes = options.dtype or [name for name in DTYPES if name != 'bfloat16' or has_bfloat16]
    until = started + REPORT_SECONDS if options.report else float('inf')
    results = run_checks(options.device, dtypes, options.quick, options.workers, until)
    seconds = time.time() - started
    wrong = [result for result in results if not result.ok]
    left_out = 2 * len(dtypes) * sum(len(cases_of(op, options.quick)) for op in OPS) - len(results)
    found = [error_table(results), *(
        f'WRONG: {result.op}, {result.update}, {result.dtype}, case "{result.case}" (K = {CASES[result.case].K}): '
        + '; '.join(result.problems)
        for result in wrong
    ), f'{len(results)} cases, {len(wrong)} wrong, {seconds:.0f} s']
    if options.report and options.device.type == 'cuda':
        found.append(table([*measure_passes(options.device)]))
    print(*found, sep='\n', flush=True)
    missing = [f'NOT REACHED: {left_out} cases, for lack of time. '
               'Run it again (what was compiled is kept), or --quick: no limit'] if left_out else []
    if options.report:
        options.report.write_text('\n'.join(['```', *lines, '', *found, *missing, '```', '']), encoding='utf-8')
        print(f'written to {options.report}')
    print(*missing, sep='\n', end='\n' if missing else '')
    return 1 if wrong else 3 if missing else 0


def parse_args(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='python -m fla_longhorn.selfcheck',
        description='Run every Longhorn op on a device and compare outputs and gradients with the float64 reference; '
        'exit status 1 where anything is off, 3 where cases were not reached. Errors are |a - ref| / |ref|, the worst of all '
        'cases against its bound.',
    )
    parser.add_argument('--device', help='cpu, cuda, cuda:1, ...; the accelerator where there is one, else the CPU')
    parser.add_argument('--dtype', choices=DTYPES, action='append', help='only this one; may be given again')
    parser.add_argument('--backend', choices=BACKENDS, help='this implementation of the ops, not the device\'s usual one')
    parser.add_argument('--quick', action='store_true', help='fewer cases')
    parser.add_argument('--workers', type=int, help='processes; by default one, and four for a report on a GPU')
    parser.add_argument(
        '--report', type=Path, nargs='?', const=Path('longhorn-report.md'), metavar='FILE',
        help='within five minutes: --quick in bfloat16 and float32, and times on a GPU, written to FILE, by default '
        'longhorn-report.md, to attach to an issue',
    )
    options = parser.parse_args(args)
    if options.backend:
        os.environ['FLA_LONGHORN_BACKEND'] = options.backend
    if options.report:
        options.quick, options.dtype = True, options.dtype or ['bfloat16', 'float32']
    try:
        options.device = torch.device(options.device or torch.accelerator.current_accelerator(check_available=True) or 'cpu')
        torch.empty(0, dtype=torch.float32, device=options.device)
        select_backend(options.device)
    except (RuntimeError, AssertionError, ValueError, ImportError) as error:
        parser.error(str(error).splitlines()[0])
    # most of the time on a GPU goes into compiling
    options.workers = options.workers or (4 if options.report and options.device.type != 'cpu' else 1)
    return options


def describe(device: torch.device) -> dict[str, str]:
    """Device, backend and versions."""
    about = {'device': str(device), 'hardware': hardware(device)}
    about['backend'] = backends.backend_name(device.type, os.environ.get('FLA_LONGHORN_BACKEND'), backends.loops)
    about |= {'platform': platform.platform(), 'python': platform.python_version(), 'fla-longhorn': fla_longhorn.__version__}
    about |= {name: str(installed_version(name)) for name in (*REQUIREMENTS, 'numba')}
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
    rows: list[tuple[str, ...]] = [('op', 'form', 'dtype', 'cases', 'outputs', 'gradients', '')]
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
