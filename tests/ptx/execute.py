"""A call of a public operator, executed as PTX and compared with `naive_recurrent_longhorn` in float64."""

from __future__ import annotations

import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla_longhorn.ops.backend import load_backend
from offgpu.absent_device import MULTIPROCESSORS
from offgpu.emulator import Emulator
from tests.ops import cases
from tests.ptx.calls import Call


@contextmanager
def as_on_a_gpu(call: Call):
    """CPU tensors go to the Triton backend, and launch parameters are those of the target."""
    backend = load_backend('triton')
    capability = {'sm_80': 8, 'sm_90': 9}[call.target]
    replaced: dict[str, Any] = {
        'select_backend': lambda device: backend,
        'device_capability': lambda device: capability,
        'multiprocessor_count': lambda device: MULTIPROCESSORS[call.target],
    }
    if call.segment:
        replaced |= {'MIN_SEGMENT_LENGTH': call.segment, 'LEAST_INTERVALS': 1}
    if call.sliced:
        replaced |= {'MIN_SLICED_LENGTH': 1}
    with ExitStack() as stack:
        for name, value in replaced.items():
            for module in importing(name):
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def importing(name: str) -> list:
    """All modules of the package that have this name; at least one must."""
    modules = [x for key, x in sys.modules.items() if key.startswith('fla_longhorn') and name in vars(x)]
    if not modules:
        raise LookupError(f'no module of fla_longhorn has {name}, which tells the kernels about the device')
    return modules


def laid_out(inputs: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The same numbers as channels out of wider tensors (`view`), not aligned to 16 bytes (`shifted`), in `mixed` dtypes."""
    if layout == 'dense':
        return inputs
    placed = {}
    for name, x in inputs.items():
        x = x.detach()
        if layout == 'view' and name in ('q', 'k', 'v', 'z'):
            wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
            wide[..., x.shape[-1]:] = x
            x = wide[..., x.shape[-1]:]
        elif layout == 'shifted' and name in ('q', 'k', 'v', 'z', 'beta'):
            wide = torch.zeros(x.numel() + 1, dtype=x.dtype)
            wide[1:] = x.flatten()
            x = wide[1:].view(x.shape)
        elif layout == 'mixed':
            x = x.to({'k': torch.float16, 'v': torch.float32}.get(name, x.dtype))
        placed[name] = x.requires_grad_()
    return placed


# tensors by the names of `tests/ops/cases.py`
Results = dict[str, Any]


def in_float64(inputs: Results, options: dict) -> Results:
    """Outputs of the naive operator, without gradients."""
    o, final_state = naive_recurrent_longhorn(**{name: x.double() for name, x in inputs.items()}, **options)
    return {'o': o, 'final_state': final_state}


def train(op: Callable, inputs: Results, options: dict, emulator: Emulator) -> tuple[Results, Results]:
    """Outputs and gradients of one call, and what they should be."""
    reference = cases.reference(inputs, options)
    with emulator.active():
        return cases.run(op, inputs, options), reference


def step(call: Call, inputs: Results, options: dict, emulator: Emulator) -> tuple[Results, Results]:
    """The same of `longhorn_state_update`, which has no gradients."""
    case = call.case
    N = case.B if case.lengths is None else len(case.lengths)
    shape = (N, case.H, case.V, case.K) if case.state_v_first else (N, case.H, case.K, case.V)
    inputs = {name: x.detach() for name, x in inputs.items() if name != 'initial_state'}
    state = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    reference = in_float64(inputs | {'initial_state': state}, options)
    options = {name: x for name, x in options.items() if name != 'output_final_state'}
    with emulator.active(), torch.no_grad():
        o = longhorn_state_update(state, **inputs, **options)
    return {'o': o, 'final_state': state}, reference


def infer(inputs: Results, options: dict, emulator: Emulator) -> tuple[Results, Results]:
    """The output of `chunk_longhorn` where neither gradients nor states are wanted."""
    inputs = {name: x.detach() for name, x in inputs.items()}
    reference = in_float64(inputs, options)
    with emulator.active(), torch.no_grad():
        o, _ = chunk_longhorn(**inputs, **options | {'output_final_state': False})
    return {'o': o}, {'o': reference['o']}


def execute(call: Call, emulator: Emulator) -> tuple[Results, Results]:
    """Run a call on an emulator; returns its results and the reference."""
    inputs = laid_out(cases.make_inputs(call.case, seed=call.seed), call.layout)
    options = cases.make_options(call.case, exact=call.exact)
    with as_on_a_gpu(call):
        if call.op == 'step':
            return step(call, inputs, options, emulator)
        if call.op == 'infer':
            return infer(inputs, options, emulator)
        op = {'chunk': chunk_longhorn, 'recurrent': fused_recurrent_longhorn}[call.op]
        return train(op, inputs, options, emulator)


def run_call(call: Call, order: str = 'together', *, races: bool = True, assemble: bool = False) -> dict:
    """A row of the table: errors, findings, launches."""
    row: dict[str, Any] = {'case': str(call), 'target': call.target, 'order': order, 'ok': False}
    started = time.perf_counter()
    emulator = Emulator(call.target, order, races, assemble)
    try:
        got, reference = execute(call, emulator)
        outputs, gradients = cases.TOLERANCE[call.case.dtype]
        errors = {name: cases.relative_error(got[name], reference[name]) for name in reference}
        bounds = {name: outputs if name in ('o', 'final_state') else gradients for name in reference}
        if call.bound_of_q is not None:
            bounds['dq'] = call.bound_of_q
        over = {name: [errors[name], bounds[name]] for name in errors if not errors[name] <= bounds[name]}
        row |= {'errors': errors, 'over': over, 'ok': not over and not emulator.findings.entries}
    except Exception as error:
        row |= {'failed': f'{type(error).__name__}: {error}', 'traceback': traceback.format_exc()[-3000:]}
    seconds = sum(x.seconds for x in emulator.launches)
    return row | {
        'findings': [vars(x) for x in emulator.findings],
        'launches': [vars(x) for x in emulator.launches],
        'compiled': emulator.compiled,
        'emulated_seconds': round(seconds, 1),
        'seconds': round(time.perf_counter() - started, 1),
    }


def summary(row: dict) -> str:
    """A line of the table, and below it what is wrong."""
    if 'failed' in row:
        return f'FAILED  {row["case"]}: {row["failed"][:300]}'
    worst = max(row['errors'], key=row['errors'].get)
    word = 'ok     ' if row['ok'] else 'DIFFERS' if row['over'] else 'FOUND  '
    text = f'{word} {row["case"]}: worst {worst} {row["errors"][worst]:.1e}, {len(row["launches"])} launches, '
    text += f'{row["emulated_seconds"]}s of {row["seconds"]}s'
    if row['compiled']:
        slowest, took = max(row['compiled'], key=lambda pair: pair[1])
        text += f', compiled {slowest} in {took}s of CPU'
    text += ''.join(f'\n          over: {name} {error:.2e} > {bound:.0e}' for name, (error, bound) in row['over'].items())
    kinds = defaultdict(list)
    for x in row['findings']:
        kinds[x['kind'], x['kernel'], x['line']].append(x)
    for (kind, kernel, line), found in kinds.items():
        text += f'\n          {kind}: {kernel} {line} at {len(found)} instructions, `{found[0]["instruction"]}` '
        text += found[0]['example']
    return text
