"""The exact kernels in the layout of tensor cores, as compiled: as exact as the general ones, and deterministic."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.ops.triton.exact.configs import GENERAL_KERNELS
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from offgpu.emulator import Emulator
from packages.offgpu.tests.ptx.calls import BF16, Call
from packages.offgpu.tests.ptx.execute import as_on_a_gpu
from tests.ops.cases import TOLERANCE, reference, run

# keys of several heads, each of which has random errors of its own
KEYS = Case(B=1, T=256, H=4, V=16, dtype=BF16, sigmoid=True)
GATE = dict(g='head', lowest=-0.05)


def emulated(case, inputs, options, general=False, order='together'):
    """Results and gradients, by the kernels in the layout of tensor cores or the general ones."""
    with as_on_a_gpu(Call('lanes', case)), mock.patch.dict(os.environ, {GENERAL_KERNELS: str(int(general))}):
        emulator = Emulator('sm_90', order, races=False)
        with emulator.active():
            results = run(chunk_longhorn, inputs, options)
    assert any('_mma' in x.kernel for x in emulator.launches) != general
    assert not emulator.findings
    return results


def with_keys(inputs, keys):
    k = inputs['k'].detach()
    if keys == 'one':
        k = k[:, :1].expand(k.shape)
    elif keys == 'decades':
        exponents = 32 * torch.rand(k.shape[1], generator=torch.Generator().manual_seed(9)) - 16
        k = (k.float() * 10 ** exponents[:, None, None]).to(k.dtype)
    return inputs | {'k': k.contiguous().requires_grad_()}


@pytest.mark.parametrize(('K', 'keys', 'gate'), [
    pytest.param(K, keys, gate, marks=[] if (K, keys, gate) == (64, 'one', False) else pytest.mark.slow)
    for K in (16, 32, 64, 128) for keys in ('one', 'random', 'decades') for gate in (False, True)
])
def test_errors_are_those_of_the_general_kernels(K, keys, gate):
    """At most 1.5 times, and within the bounds of their dtype where those are."""
    case = replace(KEYS, K=K, **(GATE if gate else {}))
    inputs, options = with_keys(make_inputs(case), keys), make_options(case, exact=True)
    wanted = reference(inputs, options)
    results = emulated(case, inputs, options), emulated(case, inputs, options, general=True)
    errors, general = ({name: float(relative_error(x[name], wanted[name])) for name in wanted} for x in results)
    outputs, gradients = TOLERANCE[BF16]
    # tiny gradients underflow where keys are large
    names = ('o', 'final_state') if keys == 'decades' else tuple(wanted)
    bounds = {name: max(outputs if name in ('o', 'final_state') else gradients, general[name]) for name in names}
    bounds = {name: min(bound, 1.5 * general[name]) for name, bound in bounds.items()}
    assert {name: (errors[name], general[name]) for name in names if errors[name] > bounds[name]} == {}


@pytest.mark.parametrize(('K', 'keys', 'gate'), [
    pytest.param(K, keys, gate, marks=[] if (K, keys, gate) == (64, 'one', False) else pytest.mark.slow)
    for K in (16, 32, 64, 128) for keys in ('one', 'random', 'decades') for gate in (False, True)
])
def test_errors_with_updates_that_are_kept(K, keys, gate):
    """Gradients are as exact as without, at most 1.1 times; outputs and the state within the bounds of their dtype."""
    results = []
    for kept in (False, True):
        case = replace(KEYS, K=K, D=True, z=True, disable_recompute=kept, **(GATE if gate else {}))
        inputs, options = with_keys(make_inputs(case), keys), make_options(case, exact=True)
        results.append(emulated(case, inputs, options))
    wanted = reference(inputs, options)
    without, errors = ({name: float(relative_error(x[name], wanted[name])) for name in wanted} for x in results)
    outputs = TOLERANCE[BF16][0]
    bounds = {name: outputs if name in ('o', 'final_state') else 1.1 * x for name, x in without.items()}
    assert {name: (errors[name], bounds[name]) for name in bounds if errors[name] > bounds[name]} == {}


@pytest.mark.parametrize('gate', [pytest.param({}, marks=pytest.mark.slow), GATE], ids=['none', 'head'])
def test_bits_do_not_depend_on_the_order_in_which_warps_run(gate):
    case = Case(B=1, T=33, H=1, K=17, V=33, dtype=BF16, D=True, z=True, sigmoid=True, **gate)
    inputs, options = make_inputs(case), make_options(case, exact=True)
    results = [emulated(case, inputs, options, order=order) for order in ('first', 'last')]
    assert {name for name, x in results[0].items() if not torch.equal(x, results[1][name])} == set()
