"""`python -m fla_longhorn.selfcheck`: every op on this machine's device against the float64 reference.

A case is run as its user would run it, outputs and gradients are compared with `naive_recurrent_longhorn` in float64 on the
CPU by `|a - ref| / |ref|`. A second run, in which memory that nobody has written yet holds NaN, must give the same bits.
The exit status is 1 where anything is off.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version as package_version
from multiprocessing import get_context

import torch

import fla_longhorn
from fla_longhorn import ops
from fla_longhorn.ops.backend import OP_BACKENDS, select_backend
from fla_longhorn.requirements import REQUIREMENTS, installed_version

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# the bounds on |a - ref| / |ref| of (outputs, gradients)
BOUNDS = {'float32': (1e-5, 1e-4), 'bfloat16': (5e-3, 5e-3), 'float16': (5e-3, 5e-3)}
OPS = ('chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update')
OUTPUTS = ('o', 'final_state')


@dataclass(frozen=True)
class Case:
    """Inputs and options of a call; `lengths` are those of packed sequences, whose sum is T."""

    name: str
    B: int = 2
    T: int = 67
    H: int = 2
    K: int = 16
    V: int = 48
    scalar_beta: bool = False
    sigmoid: bool = False
    D: bool = False
    z: bool = False
    initial_state: bool = True
    state_v_first: bool = False
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    strided: bool = False

    def packed(self, *lengths: int) -> Case:
        return replace(self, B=1, T=sum(lengths), lengths=lengths)


CASES = (
    Case('as in the model', B=2, T=130, H=1, V=96, sigmoid=True, D=True, z=True, initial_state=False),
    Case('vector beta'),
    Case('scalar beta', scalar_beta=True),
    Case('beta logits', sigmoid=True, scale=0.5),
    Case('D', D=True),
    Case('z', z=True),
    Case('state [V, K]', state_v_first=True, D=True, z=True),
    Case('packed', D=True, z=True, sigmoid=True).packed(1, 40, 0, 33, 17),
    Case('odd sizes, strided', B=3, T=31, H=3, K=5, V=7, scalar_beta=True, strided=True),
    Case('K = 1', T=19, K=1, V=33),
    Case('K = 128', B=1, T=70, H=1, K=128, V=40, z=True),
    Case('one token', T=1, sigmoid=True, D=True, z=True),
    # long and narrow: on a GPU time is cut into segments, which chunk_longhorn combines
    Case('long', B=1, T=1100, H=1, K=16, V=33, sigmoid=True, D=True, z=True),
    Case('long, packed', H=1, K=8, V=32, state_v_first=True).packed(515, 7, 700),
)
QUICK = ('as in the model', 'scalar beta', 'packed', 'odd sizes, strided', 'long')
# tokens that longhorn_state_update is taken over; decoding is about short calls
UPDATE_TOKENS = 4


@dataclass
class Result:
    """One op on one case: errors by the name of what was compared (`o`, `final_state`, `dq`, ...), and what is wrong."""

    op: str
    update: str
    dtype: str
    case: str
    errors: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems

    def worst(self, outputs: bool) -> float | None:
        """The largest error of the outputs or of the gradients; None where there are none."""
        return max((error for name, error in self.errors.items() if (name in OUTPUTS) == outputs), default=None)


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Leaf tensors by argument name, standard normal, with `beta` in (0, 1) or its logits; the same numbers in every run."""
    generator = torch.Generator().manual_seed(0)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    N = B if case.lengths is None else len(case.lengths)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    beta = draw(B, T, H) if case.scalar_beta else draw(B, T, H, V)
    inputs = {
        'q': draw(B, T, H, K), 'k': draw(B, T, H, K), 'v': draw(B, T, H, V),
        'beta': beta if case.sigmoid else beta.float().sigmoid().to(dtype),
    }
    if case.initial_state:
        inputs['initial_state'] = draw(*((N, H, V, K) if case.state_v_first else (N, H, K, V)), dtype=torch.float32)
    if case.D:
        inputs['D'] = draw(H, V)
    if case.z:
        inputs['z'] = draw(B, T, H, V)
    for name in ('q', 'k', 'v', 'z') if case.strided else ():
        if name in inputs:
            # every other element of a larger tensor
            inputs[name] = torch.stack([inputs[name], torch.full_like(inputs[name], float('nan'))], -1)[..., 0]
    return {name: copy_to(x, device).requires_grad_() for name, x in inputs.items()}


def copy_to(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that keeps gaps between the elements."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return copy.copy_(x)


def make_options(case: Case, device: torch.device, exact: bool) -> dict:
    options = {
        'scale': case.scale, 'use_beta_sigmoid_in_kernel': case.sigmoid, 'state_v_first': case.state_v_first, 'exact': exact,
    }
    if case.lengths is not None:
        options['cu_seqlens'] = torch.tensor([0, *case.lengths]).cumsum(0).to(device)
    return options


def random_like(x: torch.Tensor, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers that `dtype` can hold, as a tensor like x."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(x)


def differentiate(op: Callable, inputs: dict[str, torch.Tensor], options: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs, and the gradients of all inputs for random gradients of both outputs."""
    o, final_state = op(**inputs, output_final_state=True, **options)
    upstream = random_like(o, 1, dtype), random_like(final_state, 2, torch.float32)
    gradients = torch.autograd.grad((o, final_state), list(inputs.values()), upstream)
    return {
        'o': o.detach(), 'final_state': final_state.detach(),
        **{f'd{name}': dx for name, dx in zip(inputs, gradients, strict=True)},
    }


def update(inputs: dict[str, torch.Tensor], options: dict, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `longhorn_state_update` returns and leaves in the state, which starts at zero where the case gives none."""
    inputs = {name: x.detach() for name, x in inputs.items()}
    state = inputs.pop('initial_state', torch.zeros_like(like)).clone()
    return {'o': ops.longhorn_state_update(state, **inputs, **options), 'final_state': state}


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """Have `torch.empty` and its kin return NaN, as PyTorch does where it is told to be deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def relative_error(a: torch.Tensor, ref: torch.Tensor) -> float:
    """`|a - ref| / |ref|`; infinite where a value isn't finite, or where nothing but zeros is right."""
    a, ref = a.double().cpu(), ref.double().cpu()
    if not torch.isfinite(a).all():
        return float('inf')
    difference, norm = (a - ref).norm().item(), ref.norm().item()
    return difference / norm if norm else (float('inf') if difference else 0.0)


class Reference:
    """Float64 results on the CPU, each computed once for the ops that share a case."""

    def __init__(self) -> None:
        self.known = {}

    def __call__(self, case: Case, dtype: torch.dtype, exact: bool) -> dict[str, torch.Tensor]:
        if (key := (case, dtype, exact)) not in self.known:
            cpu = torch.device('cpu')
            inputs = {name: x.detach().double().requires_grad_() for name, x in make_inputs(case, dtype, cpu).items()}
            self.known = {key: differentiate(ops.naive_recurrent_longhorn, inputs, make_options(case, cpu, exact), dtype)}
        return self.known[key]


def check(op: str, case: Case, dtype: str, exact: bool, device: torch.device, reference: Reference) -> Result:
    """Run one op on one case, twice, and compare."""
    result = Result(op, 'exact' if exact else 'diagonal', dtype, case.name)
    started = time.perf_counter()
    try:
        wanted = reference(case, DTYPES[dtype], exact)
        inputs, options = make_inputs(case, DTYPES[dtype], device), make_options(case, device, exact)

        def run() -> dict[str, torch.Tensor]:
            if op == 'longhorn_state_update':
                return update(inputs, options, wanted['final_state'].to(device, torch.float32))
            return differentiate(getattr(ops, op), inputs, options, DTYPES[dtype])

        got = run()
        with unwritten_memory_is_nan():
            again = run()
    except Exception as error:
        result.problems.append(f'{type(error).__name__}: {error}')
        return result
    result.seconds = time.perf_counter() - started
    for name, x in got.items():
        result.errors[name] = relative_error(x, wanted[name])
        bound = BOUNDS[dtype][name not in OUTPUTS]
        if not result.errors[name] <= bound:
            result.problems.append(f'{name} is off by {result.errors[name]:.1e}, more than {bound:.0e}')
        if not torch.equal(x, again[name]):
            result.problems.append(f'{name} differs between two runs')
    return result


def cases_of(op: str, quick: bool) -> list[Case]:
    cases = [case for case in CASES if not quick or case.name in QUICK]
    if op != 'longhorn_state_update':
        return cases
    # decoding: short, and not packed unevenly
    short = [replace(case, T=min(case.T, UPDATE_TOKENS)) for case in cases if case.lengths is None]
    return list({replace(case, name=''): case for case in short}.values())


def run_checks(
    device: torch.device, dtypes: list[str], quick: bool, report: Callable[[Result], None], workers: int = 1,
) -> list[Result]:
    """All ops, both updates, all cases, each handed to `report` as it is done; `workers` processes share them."""
    plan = [(device, dtype, exact, case.name, quick) for dtype in dtypes for exact in (False, True) for case in CASES]
    pool = None if workers == 1 else ProcessPoolExecutor(workers, mp_context=get_context('spawn'))
    results = []
    with pool or nullcontext():
        for group in (pool.map if pool else map)(check_case, *zip(*plan, strict=True)):
            for result in group:
                results.append(result)
                report(result)
    return results


def check_case(device: torch.device, dtype: str, exact: bool, name: str, quick: bool) -> list[Result]:
    """All ops on the case of this name."""
    reference = Reference()
    return [
        check(op, case, dtype, exact, device, reference)
        for op in OPS for case in cases_of(op, quick) if case.name == name
    ]


def supported_dtypes(device: torch.device) -> list[str]:
    """What the device computes in; an older GPU has no bfloat16."""
    has_bfloat16 = device.type != 'cuda' or torch.cuda.is_bf16_supported(including_emulation=False)
    return [name for name in DTYPES if name != 'bfloat16' or has_bfloat16]


def describe(device: torch.device) -> dict[str, str]:
    """Device, backend and versions: what a report of a wrong kernel has to name."""
    about = {'device': str(device), 'hardware': hardware(device)}
    about['backend'] = select_backend(device).__name__.rsplit('.', 1)[-1]
    about['platform'] = platform.platform()
    about['python'] = platform.python_version()
    about['fla-longhorn'] = fla_longhorn.__version__
    about.update({name: installed_version(name) for name, *_ in REQUIREMENTS})
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
    module = getattr(torch, device.type, None)
    return module.get_device_name(device) if hasattr(module, 'get_device_name') else device.type


class Table:
    """A line for each op, update and dtype: with rich where it is installed, else in plain text."""

    COLUMNS = ('op', 'update', 'dtype', 'cases', 'outputs', 'gradients', '')

    def __init__(self, results: list[Result]) -> None:
        groups = {}
        for result in results:
            groups.setdefault((result.op, result.update, result.dtype), []).append(result)
        self.rows = [self.row(*key, group) for key, group in sorted(groups.items(), key=lambda item: item[0][2] != 'float32')]

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


def default_device() -> torch.device:
    accelerator = getattr(torch, 'accelerator', None)
    if accelerator is not None and accelerator.is_available():
        return accelerator.current_accelerator()
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


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
    options = parser.parse_args(args)
    try:
        options.device = default_device() if options.device is None else torch.device(options.device)
        torch.empty(0, device=options.device)
        if options.backend:
            os.environ['FLA_LONGHORN_BACKEND'] = options.backend
        select_backend(options.device)
    except (RuntimeError, AssertionError, ValueError, ImportError) as error:
        parser.error(str(error).splitlines()[0])
    return options


def main(args: list[str] | None = None) -> int:
    """Run the checks that `args` ask for and print the table; 0 where all is right, 1 where not (2 for a wrong option)."""
    options = parse_args(args)
    about = describe(options.device)
    for name, value in about.items():
        print(f'{name:24}{value}')

    def report(result: Result) -> None:
        if options.verbose:
            state = 'ok' if result.ok else 'WRONG'
            print(f'{result.op} {result.update} {result.dtype} {result.case}: {state}, {result.seconds:.2f} s', flush=True)

    started = time.perf_counter()
    dtypes = options.dtype or supported_dtypes(options.device)
    results = run_checks(options.device, dtypes, options.quick, report, options.workers)
    seconds = time.perf_counter() - started
    Table(results).print()
    wrong = [result for result in results if not result.ok]
    for result in wrong:
        print(f'WRONG: {result.op}, {result.update}, {result.dtype}, case "{result.case}": {"; ".join(result.problems)}')
    print(f'{len(results)} cases, {len(wrong)} wrong, {seconds:.0f} s')
    if options.json:
        rows = [{**asdict(result), 'ok': result.ok} for result in results]
        with open(options.json, 'w') as file:
            json.dump({**about, 'ok': not wrong, 'seconds': seconds, 'bounds': BOUNDS, 'results': rows}, file, indent=2)
    return 1 if wrong else 0
