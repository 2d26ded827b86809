"""A call of a public operator, executed as PTX and compared with `naive_recurrent_longhorn` in float64."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla_longhorn.ops.backends import load_backend
from fla_longhorn.selfcheck.case import make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from offgpu.emulator import Emulator
from packages.offgpu.tests.ptx.calls import Call
from tests.ops.cases import TOLERANCE, reference, run


@contextmanager
def as_on_a_gpu(call: Call):
    """CPU tensors go to the Triton backend, whose driver reports the target."""
    backend = load_backend('triton')
    replaced: dict[str, Any] = {
        'select_backend': lambda device, **options: backend,
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


OPS = {'chunk': chunk_longhorn, 'recurrent': fused_recurrent_longhorn}
# tensors by the names of `tests.ops.cases.run`
Results = dict[str, Any]


def execute(call: Call, emulator: Emulator) -> tuple[Results, Results]:
    """Run a call on an emulator; returns its results and the reference, with gradients where the operator has them."""
    case = replace(call.case, initial_state=True) if call.op == 'step' else call.case
    inputs, options = make_inputs(case), make_options(case, exact=call.exact)
    with as_on_a_gpu(call):
        if call.op in OPS:
            wanted = reference(inputs, options)
            with emulator.active():
                return run(OPS[call.op], inputs, options), wanted
        inputs = {name: x.detach() for name, x in inputs.items()}
        o, final_state = naive_recurrent_longhorn(**{name: x.double() for name, x in inputs.items()}, **options)
        del options['output_final_state']
        with emulator.active(), torch.no_grad():
            if call.op == 'infer':
                return {'o': chunk_longhorn(**inputs, **options)[0]}, {'o': o}
            state = inputs.pop('initial_state')
            return {'o': longhorn_state_update(state, **inputs, **options), 'final_state': state}, {
                'o': o, 'final_state': final_state,
            }


def run_call(call: Call, order: str = 'together', *, races: bool = True, assemble: bool = False) -> str:
    """A line of what ran; the error says what differs from the reference and what was found."""
    started = time.perf_counter()
    emulator = Emulator(call.target, order, races, assemble)
    got, wanted = execute(call, emulator)
    outputs, gradients = TOLERANCE[call.case.dtype]
    errors = {name: relative_error(got[name], wanted[name]) for name in wanted}
    bounds = {name: outputs if name in ('o', 'final_state') else gradients for name in wanted}
    if call.exact and call.case.B == call.case.T == 1 and call.case.dtype != torch.float32:
        # a single number times k, a sum that may cancel ("Precision" beside the kernels)
        bounds['dq'] = 5e-2
    worst = max(errors, key=errors.__getitem__)
    text = f'{call}: worst {worst} {errors[worst]:.1e}, {len(emulator.launches)} launches, '
    text += f'{sum(x.seconds for x in emulator.launches):.1f}s of {time.perf_counter() - started:.1f}s'
    if emulator.compiled:
        slowest, took = max(emulator.compiled, key=lambda pair: pair[1])
        text += f', compiled {slowest} in {took}s of CPU'
    wrong = [f'over: {name} {x:.2e} > {bounds[name]:.0e}' for name, x in errors.items() if not x <= bounds[name]]
    wrong += map(str, emulator.findings)
    assert emulator.launches and not wrong, '\n          '.join([text, *wrong])
    return text
