"""A gate that lets everything through."""

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.selfcheck.case import Case
from tests.ops.test_gate import ALL, without_gate


@pytest.mark.parametrize('case', [
    Case(B=2, T=150, H=2, K=16, V=45, g='channel', D=True, z=True, sigmoid=True, initial_state=True),
    Case(B=1, T=40, H=1, K=5, V=70, g='head', scalar_beta=True, allow_neg_eigval=True),
    pytest.param(Case(H=1, K=16, V=33, g='channel', dtype=torch.bfloat16, **ALL).packed(40, 0, 9), marks=pytest.mark.slow),
], ids=str)
def test_no_decay_changes_nothing_in_compiled_loops(case, exact, monkeypatch):
    """To the bit, gradients among them: one mode of rounding serves both."""
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'numba')
    got, expected = without_gate(case, chunk_longhorn, 'cpu', exact, torch.zeros_like)
    assert all(torch.equal(got[name], x) for name, x in expected.items())
