"""Compares Longhorn's operators with fla's and Mamba's in one run: time, memory and distance from the device's limits.

    python -m benchmarks ops [--device cuda] [--json FILE] [--compare OLD.json]
    python -m benchmarks ops --operators longhorn --shape B=2 T=1024 H=1 K=16 V=1536

For each operator (`registry.py`) and shape: forward, and forward with backward, in milliseconds (median and quartiles), peak
memory, bytes saved for backward, and the time as a multiple of its floor, the larger of

- bytes: inputs and outputs once (backward: inputs again, the output's gradient, the inputs' gradients), at a copy's rate;
- instructions: the update's multiply-adds, at the rate of a float32 matrix product.

Both rates are measured first. Data in a CPU's caches move faster than the copy, so small shapes can undercut the floor.

An interrupt reports the results so far; the JSON is written after every shape.

An operator is timed only if it is right: its outputs are finite and within the bounds of a float64 recurrence (the first
`--verify_outputs` tokens), and so are all gradients, computed for the first `--verify_gradients` tokens alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import torch

import fla_longhorn  # noqa: F401  registers
from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from benchmarks.ops.registry import OPERATORS, SHAPE_SETS, Operator, Shape
from fla_longhorn.selfcheck.compare import relative_error

# bounds on |a - ref| / |ref| beyond which an operator is wrong: (outputs, gradients)
BOUNDS = {torch.float32: (1e-4, 1e-3), torch.float16: (1e-2, 3e-2), torch.bfloat16: (1e-2, 3e-2)}
PASSES = ('forward', 'forward_backward')
BASELINE = 'chunk_longhorn'


class Problem:
    """An operator with its inputs at a shape."""

    def __init__(self, operator: Operator, shape: Shape, device: torch.device, dtype: torch.dtype):
        self.operator, self.function = operator, operator.load()
        self.shape, self.dtype = shape, dtype
        generator = torch.Generator(device).manual_seed(0)
        self.inputs = {name: x.draw(shape, device, dtype, generator) for name, x in operator.inputs.items()}

    def forward(self, inputs: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        result = self.function(**(self.inputs if inputs is None else inputs), **self.operator.options)
        return result[0] if isinstance(result, tuple) else result

    def without_gradients(self) -> torch.Tensor:
        with torch.no_grad():
            return self.forward()

    def output_gradient(self, o: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(o.device).manual_seed(1)
        return torch.randn(o.shape, generator=generator, device=o.device).to(self.dtype).to(o.dtype)

    def first_tokens(self, tokens: int) -> dict[str, torch.Tensor]:
        dims = {name: x.dims for name, x in self.operator.inputs.items()}
        return {
            name: (x.narrow(dims[name].index('T'), 0, tokens) if 'T' in dims[name] else x).detach().clone().requires_grad_()
            for name, x in self.inputs.items()
        }

    def errors(self, gradient_tokens: int, output_tokens: int) -> dict[str, float]:
        """Relative errors of outputs `o` and gradients for the first tokens alone, and of the whole call's first outputs."""
        tokens = min(gradient_tokens, self.shape.T)
        inputs = self.first_tokens(tokens)
        doubles = doubled(inputs)
        ref, o = self.operator.reference(*doubles), self.forward(inputs)
        do = self.output_gradient(o)
        gradients = torch.autograd.grad(o, list(inputs.values()), do)
        expected = torch.autograd.grad(ref, doubles, do.double())
        errors = {'o': relative_error(o, ref)}
        errors |= {f'd{name}': relative_error(x, y) for name, x, y in zip(inputs, gradients, expected, strict=True)}
        if tokens < self.shape.T:
            tokens = min(output_tokens, self.shape.T)
            whole = self.without_gradients()
            first = whole.narrow(self.operator.output.index('T'), 0, tokens)
            with torch.no_grad():
                ref = self.operator.reference(*doubled(self.first_tokens(tokens)))
            errors['o of all tokens'] = relative_error(first, ref) if whole.isfinite().all() else float('inf')
        return errors

    def floor(self, rates: dict) -> dict[str, float]:
        """The least milliseconds of any implementation, for each pass."""
        read = sum(x.nbytes for x in self.inputs.values())
        written = self.shape.B * self.shape.T * self.shape.C * self.dtype.itemsize
        moved = {'forward': read + written, 'forward_backward': 3 * read + 2 * written}
        on_tensor_cores = self.operator.matrix and next(iter(self.inputs.values())).is_cuda
        updates = 0 if on_tensor_cores else self.shape.B * self.shape.T * self.shape.state
        forward, backward = self.operator.fma
        instructions = {'forward': forward * updates, 'forward_backward': (forward + backward) * updates}
        return {x: 1e3 * max(moved[x] / rates['bytes_per_s'], instructions[x] / rates['fma_per_s']) for x in PASSES}


def doubled(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs.values()]


def wrong(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    outputs, gradients = BOUNDS[dtype]
    bad = [f'{name} {x:.1e}' for name, x in errors.items() if not x <= (outputs if name.startswith('o') else gradients)]
    return 'error of ' + ', '.join(bad) if bad else None


def own_shape(operator: Operator, name: str, asked: Shape) -> Shape:
    """An operator's inputs at a shape of the set `name`."""
    shape = operator.equal_state(asked) if name == 'equal_state' else asked
    return shape if any('K' in x.dims for x in operator.inputs.values()) else replace(shape, K=1)


def measure(
    operator: Operator, name: str, asked: Shape, device: torch.device, dtype: torch.dtype, rates: dict,
    verified: tuple[int, int], seconds: float,
) -> dict:
    """One row: identity, status and, if the operator is right, its figures."""
    shape = own_shape(operator, name, asked)
    row = {'operator': operator.name, 'backend': operator.backend, 'set': name, 'shape': str(asked), **asdict(shape)}
    row['state'] = shape.state
    if operator.max_tokens and operator.max_tokens < shape.T and name in SHAPE_SETS[device.type]:
        return row | {'status': 'not run', 'reason': f'slow, in the sets up to {operator.max_tokens} tokens only'}
    with mock.patch.dict(os.environ, operator.environment):
        try:
            problem = Problem(operator, shape, device, dtype)
            row['errors'] = problem.errors(*verified)
            reason = wrong(row['errors'], dtype)
            if reason:
                return row | {'status': 'wrong', 'reason': reason}
            do = problem.output_gradient(problem.without_gradients())
            leaves = list(problem.inputs.values())
            runs: dict[str, Callable] = {
                'forward': problem.without_gradients,
                'forward_backward': lambda: torch.autograd.grad(problem.forward(), leaves, do),
            }
            row['saved_bytes'] = timing.saved_bytes(problem.forward)
            floor = problem.floor(rates)
            for key, run in runs.items():
                if device.type == 'cuda':
                    run()  # autotuning takes memory too
                peak = timing.peak_bytes(run, device)
                figures = timing.summarize(timing.measure_times(run, device, seconds))
                row[key] = figures | {'peak_bytes': peak, 'floor_ms': floor[key], 'of_floor': figures['ms'] / floor[key]}
        except Exception as error:  # another package's operator may raise any error for a shape
            return row | {'status': 'failed', 'reason': timing.describe_error(error)}
        finally:
            if device.type == 'cuda':
                torch.cuda.empty_cache()
    return row | {'status': 'ok'}


def measure_shape(report: dict, operators: list[Operator], name: str, shape: Shape, *arguments) -> None:
    """Add one row per operator at a shape of the set `name`; `arguments` are those of `measure`."""
    print(f'\n{name}: {shape}', flush=True)
    print_header()
    group = []
    for operator in operators:
        row = measure(operator, name, shape, *arguments)
        group.append(row)
        report['rows'].append(row)
        add_relative(row, group)
        print_row(row)


def missing(operator: Operator, device: torch.device) -> str | None:
    """The reason why an operator cannot run here, or None."""
    if operator.device != device.type:
        return f'runs on {operator.device} only'
    if operator.backend == 'numba' and importlib.util.find_spec('numba') is None:
        return 'numba is not installed'
    try:
        operator.load()
    except (ImportError, AttributeError) as error:
        return timing.describe_error(error)
    return None


def add_relative(row: dict, rows: list[dict]) -> None:
    """Times as multiples of those of chunk_longhorn (diagonal, one step size per channel), the first of its shape's rows."""
    base = next((x for x in rows if x['status'] == 'ok' and x['operator'] == BASELINE), None)
    if row['status'] == 'ok' and base:
        for name in PASSES:
            row[name]['of_longhorn'] = row[name]['ms'] / base[name]['ms']


def print_header() -> None:
    units = f'{"ms":>12} {"quartiles":>21} {"floor":>7} {"MB":>7}'
    print(f'{"":55}{"forward":>50}{"forward + backward":>50}')
    print(f'{"operator":41}{"backend":14}' + units * 2 + f'{"saved MB":>10} {BASELINE:>15}', flush=True)


def print_row(row: dict) -> None:
    label = f'{row["operator"]:41}{row["backend"]:14}'
    if row['status'] != 'ok':
        print(f'{label}  {row["status"]}: {row["reason"]}', flush=True)
        return
    for name in PASSES:
        x = row[name]
        spread = f'{x["ms_low"]:.3f} - {x["ms_high"]:.3f}'
        peak = '' if x['peak_bytes'] is None else f'{x["peak_bytes"] / 2**20:.1f}'
        label += f'{x["ms"]:12.3f} {spread:>21} {x["of_floor"]:6.1f}x {peak:>7}'
    relative = row['forward_backward'].get('of_longhorn')
    print(f'{label}{row["saved_bytes"] / 2**20:10.1f}' + (f' {relative:14.2f}x' if relative else ''), flush=True)


def times_by_name(report: dict) -> dict[str, dict]:
    return {
        f'{row["operator"]} ({row["backend"]}) {row["set"]} {row["shape"]} {name}': row[name]
        for row in report['rows'] if row['status'] == 'ok' for name in PASSES
    }


def parse_shape(items: list[str]) -> Shape:
    return Shape(**{name: int(value) for name, value in (item.split('=') for item in items)})


def parse_arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks ops', description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu', choices=('cpu', 'cuda'))
    parser.add_argument('--dtype', choices=('float32', 'float16', 'bfloat16'), help='default: bfloat16 on a GPU, else float32')
    parser.add_argument('--sets', nargs='+', choices=list(SHAPE_SETS['cuda']), help='shape sets (default: all)')
    parser.add_argument('--shape', nargs=5, metavar=('B=', 'T=', 'H=', 'K=', 'V='), help='one shape instead of the sets')
    parser.add_argument('--operators', nargs='+', help='only operators with one of these in their name')
    parser.add_argument('--seconds', type=float, help='of repeats for each time (default: 0.3 on a GPU, else 0.02)')
    parser.add_argument('--verify_gradients', type=int, help='tokens of that check (default: 256 on a GPU, else 64)')
    parser.add_argument('--verify_outputs', type=int, help='tokens of that check (default: 16384 on a GPU, else 2048)')
    timing.add_report_arguments(parser)
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> None:
    options = parse_arguments(args)
    device, gpu = torch.device(options.device), options.device == 'cuda'
    dtype = getattr(torch, options.dtype or ('bfloat16' if gpu else 'float32'))
    seconds = options.seconds if options.seconds is not None else 0.3 if gpu else 0.02
    verified = options.verify_gradients or (256 if gpu else 64), options.verify_outputs or (16384 if gpu else 2048)
    sets = SHAPE_SETS[device.type]
    sets = {'shape': [parse_shape(options.shape)]} if options.shape else {name: sets[name] for name in options.sets or sets}
    chosen = [x for x in OPERATORS if not options.operators or any(part in x.name for part in options.operators)]
    other = json.loads(Path(options.compare).read_text()) if options.compare else None

    machine, rates = describe_machine(device), timing.device_rates(device)
    absent = {f'{x.name} ({x.backend})': reason for x in chosen if (reason := missing(x, device))}
    precision = str(dtype).removeprefix('torch.')
    print(f'{machine["device"]}, {machine["threads"]} threads, {precision}, commit {machine["commit"]}')
    print(f'copies {rates["bytes_per_s"] / 1e9:.1f} GB/s, multiply-adds {rates["fma_per_s"] / 1e9:.1f} G/s')
    if not gpu and not options.shape:
        print('On the CPU the sets are small (one sequence, up to 2048 tokens); those of a GPU go up to 131072 tokens.')
    report = {
        'machine': machine, 'rates': rates, 'dtype': precision, 'rows': [],
        'verified_tokens': dict(zip(('gradients', 'outputs'), verified, strict=True)), 'not_run': absent,
    }
    present = [x for x in chosen if f'{x.name} ({x.backend})' not in absent]
    try:
        for name, shapes in sets.items():
            for shape in shapes:
                measure_shape(report, present, name, shape, device, dtype, rates, verified, seconds)
                if options.json:
                    timing.write_report(report, options.json)
    except KeyboardInterrupt:
        print('\nstopped')
    for reason in dict.fromkeys(absent.values()):
        print(f'\nnot run: {", ".join(x for x in absent if absent[x] == reason)}: {reason}')
    if options.json:
        timing.write_report(report, options.json)
        print(f'\nwritten to {options.json}')
    if other:
        print('\n'.join([f'\nagainst {options.compare}:', *timing.compare(report, other, times_by_name)]))
