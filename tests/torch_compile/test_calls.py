"""What a trace does with a cache to look ahead from, and with packed sequences by the names of other libraries."""

import pytest
import torch
from fla.models.utils import Cache

from fla_longhorn.layers import Longhorn
from tests.devices import slow_but
from tests.torch_compile.graphs import assert_equal, compiled
from tests.torch_compile.test_model import build

BOUNDS = torch.tensor([0, 3, 9], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize('T', [1, 3])
@torch.no_grad()
def test_a_look_ahead_changes_nothing(T, device):
    layer = Longhorn(hidden_size=24, state_size=4, layer_idx=0).to(device)
    h, cache = torch.randn(2, 7 + T, 24, device=device), Cache()
    layer(h[:, :7], past_key_values=cache, use_cache=True)
    before = {name: cache[0][name].clone() for name in ('recurrent_state', 'conv_state')}
    function, counter = compiled(layer)
    first, again = (function(h[:, 7:], past_key_values=cache, use_cache=False)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert cache.get_seq_length() == 7
    assert all(torch.equal(cache[0][name], x) for name, x in before.items())
    assert_equal({'o': first}, {'o': layer(h)[0][:, 7:]}, 1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize('name', slow_but(('position_ids',), ('position_ids', 'seq_idx')))
def test_boundaries_that_a_trace_cannot_read(name, device):
    """Refused in one graph; with a graph break, they are read in between. One token has none."""
    model = build(device).eval()
    ids, positions = torch.randint(3, 53, (1, 9), device=device), {name: POSITIONS.to(device)}
    message = f'{name} must be None in a trace of torch.compile, torch.export or torch.func'
    function, _ = compiled(model)
    with torch.no_grad():
        with pytest.raises(Exception, match=message):
            function(ids, use_cache=False, **positions)
        with pytest.raises(Exception, match=message):
            torch.export.export(model, (ids,), {'use_cache': False, **positions})
        if name == 'position_ids':
            torch._dynamo.reset()
            logits = torch.compile(model, backend='aot_eager')(ids, use_cache=False, **positions).logits
            assert_equal({'logits': logits}, {'logits': model(ids, cu_seqlens=BOUNDS.to(device)).logits})
        one = {name: POSITIONS[:, :1].to(device)}
        assert_equal({'x': compiled(model)[0](ids[:, :1], **one).logits}, {'x': model(ids[:, :1]).logits})
