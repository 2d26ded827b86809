"""How often the host waits for the device in what a model does once per call."""

import pytest
import torch

from fla_longhorn.modules.boundaries import find_rows
from offgpu.pretend import counted

BOUNDS = torch.tensor([0, 4, 9], dtype=torch.int32)
GIVEN = {
    'cu_seqlens': BOUNDS,
    'cu_seq_lens_q': BOUNDS,
    'cu_seq_lens_k': BOUNDS.long(),
    'position_ids': torch.cat([torch.arange(4), torch.arange(5)])[None],
    'seq_idx': torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32),
}


@pytest.mark.parametrize('mask', [False, True])
def test_boundaries_are_read_at_once(mask):
    """Whatever a call has of them, the host waits for the device once."""
    device = torch.device('cuda', 0)
    kwargs = {name: x.to(device) for name, x in GIVEN.items()}
    attention_mask = torch.ones(1, 9, dtype=torch.int64, device=device) if mask else None
    with counted() as counts:
        rows, rest = find_rows(kwargs, 1, 9, device, attention_mask)
    assert counts.syncs.total() == 1, counts.stacks
    assert rest['cu_seqlens_cpu'].tolist() == rows.cu_seqlens.tolist() == BOUNDS.tolist()
