"""Bad calls of longhorn_state_update with a pool: the error names the argument, and the pool stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fla_longhorn.ops import longhorn_state_update

N, P, H, K, V = 4, 9, 2, 5, 6


def arguments(device='cpu', **changes) -> dict[str, Any]:
    q, k = torch.randn(2, N, 1, H, K)
    v, beta = torch.randn(N, 1, H, V), torch.rand(N, 1, H, V)
    good = dict(state=torch.randn(P, H, K, V), q=q, k=k, v=v, beta=beta, state_indices=torch.tensor([7, 2, 0, 8]))
    good = {name: x.to(device) for name, x in good.items()}

    def changed(change):
        if isinstance(change, Callable):
            return change(good)
        return change.to(device) if isinstance(change, torch.Tensor) else change

    return good | {name: changed(change) for name, change in changes.items()}


BAD = {
    'other heads': (dict(state=lambda x: x['state'][:, :1]), ValueError, r'state must have shape \[P, H, K, V\], .*here \[9'),
    'the other layout': (dict(state_v_first=True), ValueError, r'state must have shape \[P, H, V, K\] \(state_v_first=True\)'),
    'an empty pool': (dict(state=lambda x: x['state'][:0]), ValueError, r'state must have shape \[P, H, K, V\], a pool'),
    'transposed rows': (
        dict(state=lambda x: x['state'].mT.contiguous().mT), ValueError, 'state must have contiguous rows, 60 or more',
    ),
    'one row for all': (
        dict(state=lambda x: x['state'][:1].expand(P, -1, -1, -1)), ValueError, 'state must have contiguous rows',
    ),
    'overlapping rows': (
        dict(state=lambda x: x['state'].as_strided((P, H, K, V), (59, K * V, V, 1))), ValueError, 'state must have contiguous',
    ),
    'no states': (dict(state=None), TypeError, 'state must be a torch.Tensor'),
    'other states without a pool': (
        dict(state=lambda x: x['state'][:N, :, :2], state_indices=None), ValueError,
        r'state must have shape \[N, H, K, V\], one state per sequence',
    ),
    'states with a gradient': (
        dict(state=lambda x: x['state'].requires_grad_()), ValueError, 'longhorn_state_update has no gradient',
    ),
    'a negative view': (
        dict(state=lambda x: torch._neg_view(x['state'])), ValueError, 'state must not be a negative view.*resolve_neg',
    ),
    'double states': (dict(state=lambda x: x['state'].double()), TypeError, 'state must be float32 to be updated in place'),
    'states elsewhere': (dict(state=lambda x: x['state'].to('meta')), ValueError, 'state must be on the device of q'),
    'float indices': (
        dict(state_indices=lambda x: x['state_indices'].float()), TypeError, 'state_indices must be a tensor of int32',
    ),
    'a list': (dict(state_indices=[1, 2, 3, 4]), TypeError, 'state_indices must be a tensor of int32 or int64, got list'),
    'too few': (
        dict(state_indices=lambda x: x['state_indices'][:3]), ValueError, r'state_indices must have shape \[N\], .*got \[3\]',
    ),
    'indices elsewhere': (
        dict(state_indices=lambda x: x['state_indices'].to('meta')), ValueError, 'state_indices must be on the device of q',
    ),
    'final rows alone': (
        dict(state=torch.zeros(N, H, K, V), state_indices=None, final_state_indices=torch.arange(N)), ValueError,
        'final_state_indices needs state_indices',
    ),
    'flags are numbers': (
        dict(has_initial_state=torch.ones(N, dtype=torch.long)), TypeError, 'has_initial_state must be a tensor of bool',
    ),
    'no null index': (dict(pad_slot_id=None), TypeError, 'pad_slot_id must be an integer, got NoneType'),
}
BAD_ROWS = {
    'outside': (dict(state_indices=torch.tensor([7, 2, 0, 9])), ValueError, 'state_indices must be below .* 9, got 9'),
    'final outside': (
        dict(final_state_indices=torch.tensor([7, -1, 9, 9])), ValueError, 'final_state_indices must be below .* 9, got 9',
    ),
    'twice': (
        dict(state_indices=torch.tensor([7, 2, 2, 8])), ValueError, 'state_indices must not name a row twice, got 2 for',
    ),
    'final twice': (
        dict(final_state_indices=torch.tensor([1, 3, 3, 4])), ValueError, 'final_state_indices must not name a row twice',
    ),
    'written and read': (
        dict(final_state_indices=torch.tensor([2, 1, 3, 4])), ValueError,
        'final_state_indices must not name a row that another sequence starts from, got 2 for sequence 0, from .* sequence 1',
    ),
}


def check(call: dict[str, Any], error: type[Exception], message: str) -> None:
    state, before = call['state'], copy.deepcopy(call['state'])
    with pytest.raises(error, match=message):
        longhorn_state_update(**call)
    assert state is None or state.is_meta or torch.equal(state, before)


@pytest.mark.parametrize('name', list(BAD))
def test_bad_call(name, device):
    changes, error, message = BAD[name]
    check(arguments(device, **changes), error, message)


@pytest.mark.parametrize('name', list(BAD_ROWS))
def test_bad_rows(name):
    changes, error, message = BAD_ROWS[name]
    check(arguments(**changes), error, message)


def test_compiled_programs_check_rows_when_they_run():
    torch.compiler.reset()
    compiled = torch.compile(longhorn_state_update, backend='eager', fullgraph=True)
    compiled(**arguments())
    with pytest.raises(ValueError, match='state_indices must not name a row twice'):
        compiled(**arguments(state_indices=torch.tensor([7, 7, 0, 1])))


def test_shared_rows_that_are_not_written_are_fine():
    """Several sequences start from one prefix; absent rows are as many as wanted."""
    call = arguments(state_indices=torch.tensor([7, 7, -1, -1]), final_state_indices=torch.tensor([1, 2, 3, 3]))
    before = call['state'].clone()
    longhorn_state_update(**call)
    changed = (call['state'] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2]
