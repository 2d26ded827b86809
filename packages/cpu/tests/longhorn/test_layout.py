"""The gate z is read where it lies, as half of a projection's output does."""

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs
from fla_longhorn_cpu import backend as numba

B, T, H, V = 2, 70, 2, 20


def halves(dtype):
    return torch.randn(B, T, 2 * H * V, dtype=dtype).chunk(2, -1)[1].view(B, T, H, V)


LAYOUTS = {
    'half': (halves, 2 * H * V),
    'half of one row': (lambda dtype: halves(dtype)[:1].expand(B, T, H, V), H * V),
    'part of the tokens': (lambda dtype: torch.randn(B, 2 * T, H, V, dtype=dtype)[:, T:], H * V),
    'heads first': (lambda dtype: torch.randn(B, H, T, V, dtype=dtype).transpose(1, 2), H * V),
    'half of each head': (lambda dtype: torch.randn(B, T, H, 2 * V, dtype=dtype)[..., V:], H * V),
    'channels first': (lambda dtype: torch.randn(B, T, V, H, dtype=dtype).transpose(2, 3), H * V),
    'one gate for all tokens': (lambda dtype: torch.randn(B, 1, H, V, dtype=dtype).expand(B, T, H, V), H * V),
}


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('layout', LAYOUTS)
def test_gate_in_any_layout(monkeypatch, layout, dtype, exact):
    make, stride = LAYOUTS[layout]
    inputs, z, strides, results = make_inputs(Case(B, T, H, 5, V, dtype, D=True)), make(dtype), [], []
    rows_of = numba.rows_of
    monkeypatch.setattr(numba, 'rows_of', lambda *given: strides.append((found := rows_of(*given))[1]) or found)
    for gate in (z, z.contiguous()):
        gate = gate.detach().requires_grad_()
        o, _ = chunk_longhorn(**inputs, z=gate, exact=exact)
        results.append((o, *torch.autograd.grad(o, [*inputs.values(), gate], torch.ones_like(o))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert strides == [stride, stride, H * V, H * V]
