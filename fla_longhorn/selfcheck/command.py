"""The command line."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict

import torch

from fla_longhorn.ops.backend import OP_BACKENDS, select_backend
from fla_longhorn.selfcheck.case import DTYPES
from fla_longhorn.selfcheck.compare import BOUNDS, Result, run_checks
from fla_longhorn.selfcheck.compiling import add_model_options, compile_model
from fla_longhorn.selfcheck.report import describe, print_table


def main(args: list[str] | None = None) -> int:
    """Run the checks and print a table; returns 0 if all is right and 1 if not, and exits with 2 for a wrong option."""
    options = parse_args(args)
    about = describe(options.device)
    for name, value in about.items():
        print(f'{name:24}{value}')

    def report(result: Result) -> None:
        if options.verbose:
            state = 'ok' if result.ok else 'WRONG'
            print(f'{result.op} {result.update} {result.dtype} {result.case}: {state}, {result.seconds:.2f} s', flush=True)

    if options.compile_only:
        return compile_model(options)
    started = time.perf_counter()
    # an older GPU has no bfloat16
    has_bfloat16 = options.device.type != 'cuda' or torch.cuda.is_bf16_supported(including_emulation=False)
    dtypes = options.dtype or [name for name in DTYPES if name != 'bfloat16' or has_bfloat16]
    results = run_checks(options.device, dtypes, options.quick, report, options.workers)
    seconds = time.perf_counter() - started
    print_table(results)
    wrong = [result for result in results if not result.ok]
    for result in wrong:
        print(f'WRONG: {result.op}, {result.update}, {result.dtype}, case "{result.case}": {"; ".join(result.problems)}')
    print(f'{len(results)} cases, {len(wrong)} wrong, {seconds:.0f} s')
    if options.json:
        rows = [{**asdict(result), 'ok': result.ok} for result in results]
        with open(options.json, 'w') as file:
            json.dump({**about, 'ok': not wrong, 'seconds': seconds, 'bounds': BOUNDS, 'results': rows}, file, indent=2)
    return 1 if wrong else 0


def parse_args(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='python -m fla_longhorn.selfcheck',
        description='Run every Longhorn op on a device and compare outputs and gradients with the float64 reference; '
        'exit status 1 where anything is off. Errors are |a - ref| / |ref|, the worst of all cases against its bound.',
    )
    parser.add_argument('--device', help='cpu, cuda, cuda:1, ...; the accelerator where there is one, else the CPU')
    parser.add_argument('--dtype', choices=DTYPES, action='append', help='only this one; may be given again')
    parser.add_argument('--backend', choices=OP_BACKENDS, help='this implementation of the ops, not the device\'s usual one')
    parser.add_argument('--quick', action='store_true', help='fewer cases')
    parser.add_argument('--workers', type=int, default=1, help='processes; most of the time on a GPU goes into compiling')
    parser.add_argument('--json', metavar='FILE', help='write device, versions and the error of each case to FILE')
    parser.add_argument('--verbose', action='store_true', help='a line for each case as it is done')
    model = parser.add_argument_group(
        'a model whose kernels are only compiled', 'by --workers processes, into the cache that TRITON_CACHE_DIR names; '
        'each takes the memory of a training step of one layer. In --dtype, by default bfloat16.',
    )
    model.add_argument('--compile-only', action='store_true', help='compile kernels of training and decoding, check nothing')
    add_model_options(model)
    model.add_argument('--autocast', action='store_true', help="parameters in float32, as transformers' Trainer has them")
    options = parser.parse_args(args)
    if options.backend:
        os.environ['FLA_LONGHORN_BACKEND'] = options.backend
    on_triton = find_device(parser, options)
    if options.compile_only and not on_triton:
        parser.error(f'--compile-only needs a GPU, for which Triton compiles; the device is {options.device}')
    return options


def find_device(parser: argparse.ArgumentParser, options: argparse.Namespace) -> bool:
    """Make a device of `options.device`, by default the accelerator's; returns whether Triton compiles for it."""
    try:
        options.device = torch.device(options.device or torch.accelerator.current_accelerator(check_available=True) or 'cpu')
        torch.empty(0, dtype=torch.float32, device=options.device)
        backend = select_backend(options.device)
    except (RuntimeError, AssertionError, ValueError, ImportError) as error:
        parser.error(str(error).splitlines()[0])
    return options.device.type != 'cpu' and backend.__name__.endswith('.triton')
