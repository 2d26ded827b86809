"""The checks of an op's outputs and gradients.

Their error `|a - ref| / |ref|` is that against `naive_recurrent_longhorn` in float64 on the CPU. A second run, with unwritten
memory filled with NaN, must give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

import torch

from fla_longhorn import ops
from fla_longhorn.selfcheck import case as cases
from fla_longhorn.selfcheck.case import DTYPES, OPS, Case, cases_of, make_inputs, make_options

# the bounds on |a - ref| / |ref| of (outputs, gradients)
BOUNDS = {'float32': (1e-5, 1e-4), 'bfloat16': (5e-3, 5e-3), 'float16': (5e-3, 5e-3)}
OUTPUTS = ('o', 'final_state')


@dataclass
class Result:
    """Errors of one op on one case by name (`o`, `final_state`, `dq`, ...), and what is wrong."""

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


def random_like(x: torch.Tensor, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers, rounded to `dtype`, as a tensor like `x`."""
    generator = torch.Generator('cpu').manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float32, device='cpu').to(dtype).to(x)


def differentiate(op: Callable, inputs: dict[str, torch.Tensor], options: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The outputs, and the gradients of all inputs for random gradients of the outputs."""
    o, final_state = op(**inputs, **options)
    upstream = random_like(o, 1, dtype), random_like(final_state, 2, torch.float32)
    gradients = torch.autograd.grad((o, final_state), list(inputs.values()), upstream)
    return {
        'o': o.detach(), 'final_state': final_state.detach(),
        **{f'd{name}': dx for name, dx in zip(inputs, gradients, strict=True)},
    }


def update(inputs: dict[str, torch.Tensor], options: dict, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of `longhorn_state_update` and the updated state, which starts at zero unless the case has one."""
    arguments: dict[str, Any] = {name: x.detach() for name, x in inputs.items()}
    state = arguments.pop('initial_state', torch.zeros_like(like)).clone()
    arguments |= {name: x for name, x in options.items() if name != 'output_final_state'}
    return {'o': ops.longhorn_state_update(state, **arguments), 'final_state': state}


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill the memory of `torch.empty` and similar functions with NaN, by PyTorch's deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def relative_error(a: torch.Tensor, ref: torch.Tensor) -> float:
    """`|a - ref| / |ref|`; infinite if shapes differ, if a value is not finite, or if `ref` is zero and `a` is not."""
    a, ref = a.double().cpu(), ref.double().cpu()
    if a.shape != ref.shape or not a.isfinite().all():
        return float('inf')
    difference, norm = (a - ref).norm().item(), ref.norm().item()
    return difference / norm if norm else (float('inf') if difference else 0.0)


@lru_cache(maxsize=1)
def reference(case: Case, exact: bool) -> dict[str, torch.Tensor]:
    """Float64 results on the CPU, kept for the next op on the same case."""
    inputs = {name: x.detach().double().requires_grad_() for name, x in make_inputs(case).items()}
    return differentiate(ops.naive_recurrent_longhorn, inputs, make_options(case, exact=exact), case.dtype)


def check(op: str, name: str, case: Case, dtype: str, exact: bool, device: torch.device) -> Result:
    """Run one op on the case of this name, twice, and compare."""
    result, case = Result(op, 'exact' if exact else 'diagonal', dtype, name), replace(case, dtype=DTYPES[dtype])
    started = time.perf_counter()
    try:
        wanted = reference(case, exact)
        inputs, options = make_inputs(case, device), make_options(case, device, exact)

        def run() -> dict[str, torch.Tensor]:
            if op == 'longhorn_state_update':
                return update(inputs, options, wanted['final_state'].to(device, torch.float32))
            return differentiate(getattr(ops, op), inputs, options, case.dtype)

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


def run_checks(
    device: torch.device, dtypes: list[str], quick: bool, workers: int = 1, until: float = float('inf'),
) -> list[Result]:
    """Check all ops, both updates and all cases in `workers` processes.

    Cases that have not begun at the time `until` are left out.
    """
    plan = [(device, dtype, exact, name, quick, until) for dtype in dtypes for exact in (False, True) for name in cases.CASES]
    pool = None if workers == 1 else ProcessPoolExecutor(workers, mp_context=get_context('spawn'))
    with pool or nullcontext():
        groups = (pool.map if pool else map)(check_case, *zip(*plan, strict=True))
        return [result for group in groups for result in group]


def check_case(device: torch.device, dtype: str, exact: bool, name: str, quick: bool, until: float) -> list[Result]:
    """Check all ops on the case of this name."""
    chosen = {op: cases_of(op, quick) for op in OPS} if time.time() < until else {}
    return [check(op, name, of[name], dtype, exact, device) for op, of in chosen.items() if name in of]
