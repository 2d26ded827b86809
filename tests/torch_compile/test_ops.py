"""The ops under `torch.compile`, and the operators behind them under `torch.library.opcheck`."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.autograd import longhorn_fwd
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from tests.devices import slow_but
from tests.ops.cases import run
from tests.torch_compile.graphs import assert_equal, compiled

OPS = [chunk_longhorn, fused_recurrent_longhorn]
EVERYTHING = Case(B=2, T=37, H=2, K=5, V=6, sigmoid=True, D=True, z=True, initial_state=True, scale=0.5)
SCALAR = Case(H=1, K=4, V=5, scalar_beta=True, D=True, initial_state=True, state_v_first=True).packed(5, 0, 1, 40)
# on a GPU and in the interpreter, forward keeps its updates
KEPT = replace(EVERYTHING, H=1, V=5, dtype=torch.bfloat16, disable_recompute=True)
LENGTHS = [Case(T=T, B=2, H=1, K=3, V=4, z=True) for T in (9, 20, 64, 65, 130, 31)]
PACKINGS = [
    Case(H=1, K=3, V=4, initial_state=True).packed(*lengths)
    for lengths in ((4, 5), (3, 0, 9), (70, 2, 1, 8), (2, 2), (5, 6, 7, 8, 9))
]


CASES = {'everything': [EVERYTHING], 'kept': [KEPT], 'scalar': [SCALAR], 'lengths': LENGTHS, 'packed': PACKINGS}


@pytest.mark.parametrize(('name', 'op'), slow_but(zip(CASES, OPS * 3, strict=False), product(CASES, OPS)))
def test_equals_eager(op, name, exact, device):
    """The second case makes the graph dynamic, and any other then fits it."""
    function, counter = compiled(op)
    cases = CASES[name]
    for case in cases:
        inputs, options = make_inputs(case, device), make_options(case, device, exact)
        assert_equal(run(function, inputs, options), run(op, inputs, options))
    assert counter.frame_count == min(len(cases), 2)


@pytest.mark.parametrize('case', [EVERYTHING, replace(SCALAR, B=1, T=80, lengths=(40, 40)), KEPT], ids=str)
def test_opcheck(case, exact, device):
    """Schema, fake tensors, autograd registration and AOT dispatch with dynamic shapes; of a pool: `test_pool.py`.

    The sequences are of lengths that leave no slot for a saved state unused: nobody writes such a slot, or reads it.
    """
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    args = Arguments(**inputs, **{**options, 'scale': 0.5, 'output_final_state': True})
    detached = args._replace(**{name: x.detach() for name, x in inputs.items()})
    for parallel in (False, True):
        torch.library.opcheck(torch.ops.fla_longhorn.longhorn_fwd, (*args, True, parallel))
        o, final_state, states, us = longhorn_fwd(*args, True, parallel)
        saved = states.detach(), us if us.numel() else None
        torch.library.opcheck(torch.ops.fla_longhorn.longhorn_bwd, (
            torch.randn_like(o), torch.randn_like(final_state), *saved, *detached, parallel,
        ))
