"""torch's defaults change nothing: every buffer of the operators says its dtype and device.

A default dtype is what Lightning's and Fabric's `bf16-true` set around a forward. The default device `meta` shows a buffer
that says none: it has no memory.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from tests.devices import INTERPRETING

CASES = [
    Case(B=2, T=9, H=1, K=5, V=9, D=True, z=True, sigmoid=True, initial_state=True),
    Case(B=1, T=17, H=2, K=16, V=9, scalar_beta=True, initial_state=True, state_v_first=True, dtype=torch.bfloat16),
    Case(H=1, K=3, V=9, D=True, z=True, dtype=torch.float16).packed(3, 0, 9),
]


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = [
    partial(default_dtype, torch.bfloat16), partial(default_dtype, torch.float16), partial(default_dtype, torch.float64),
    partial(torch.device, 'meta'),
]


def results(op, inputs, options, gradients):
    """Outputs and gradients, then those of states in place: the first tokens of each row, some from a pool."""
    outputs = op(**inputs, **options)
    found = [*outputs, *torch.autograd.grad(outputs, list(inputs.values()), gradients)]
    with torch.no_grad():
        options = {name: x for name, x in options.items() if name not in ('output_final_state', 'cu_seqlens')}
        tokens = {name: x if name == 'D' else x[:, :2] for name, x in inputs.items() if name != 'initial_state'}
        B = len(inputs['q'])
        for T, rows in ((1, None), (2, None), (1, torch.arange(B, device=inputs['q'].device) + 1)):
            states = outputs[1].detach().contiguous()[:1].repeat(B if rows is None else B + 2, 1, 1, 1)
            part = {name: x if name == 'D' else x[:, :T] for name, x in tokens.items()}
            found += [longhorn_state_update(states, **part, **options, state_indices=rows), states]
    return found


@pytest.mark.usefixtures('backend', 'poison')
@pytest.mark.parametrize('case', CASES, ids=str)
@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn])
def test_defaults_change_nothing(op, case, exact, device):
    check_defaults(op, case, exact, device)


def check_defaults(op, case, exact, device):
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    shapes = [x.shape for x in op(**inputs, **options)]
    gradients = torch.randn(shapes[0], device=device).to(case.dtype), torch.randn(shapes[1], device=device)
    expected = results(op, inputs, options, gradients)
    # the interpreter takes seconds a call
    for default in DEFAULTS[::3] if INTERPRETING else DEFAULTS:
        with default():
            got = results(op, inputs, options, gradients)
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype and a.device == b.device
            assert torch.equal(a, b)
