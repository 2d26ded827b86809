"""How many functions of the package are on the way from a public operator to a kernel."""

import traceback

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update
from tests.ops.cases import Case, make_inputs


def update(q, **inputs):
    return longhorn_state_update(torch.zeros(*q.shape[:1], *q.shape[2:], inputs['v'].shape[-1], device=q.device), q, **inputs)


@pytest.mark.parametrize('grad', [False, True], ids=['plain', 'recorded'])
@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn, update])
def test_at_most_five(op, exact, grad, monkeypatch, triton_device):
    launch, found = GridExecutor.__call__, []

    def count(self, *args, **kwargs):
        found.append([x.name for x in traceback.extract_stack() if '/fla_longhorn/' in x.filename])
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, '__call__', count)
    inputs = make_inputs(Case(B=1, T=1 if op is update else 17, H=1, K=4, V=16), triton_device)
    with torch.set_grad_enabled(grad):
        op(**{name: x.detach() if op is update else x for name, x in inputs.items()}, exact=exact)
    assert found and len(found[-1]) <= 5, found
