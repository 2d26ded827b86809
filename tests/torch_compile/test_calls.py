"""What a trace does with a cache to look ahead from, and with packed sequences by the names of other libraries."""

import pytest
import torch
from fla.models.utils import Cache
from torch._dynamo.testing import CompileCounterWithBackend

from fla_longhorn.layers import Longhorn
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


@pytest.mark.parametrize('names', [
    {'cu_seq_lens_q': BOUNDS, 'cu_seq_lens_k': BOUNDS.clone(), 'max_length_q': 6, 'max_length_k': 6},
    {'cu_seq_lens_q': BOUNDS, 'cu_seq_lens_k': BOUNDS.clone(), 'position_ids': POSITIONS, 'seq_idx': (POSITIONS > 5).int()},
    {'cu_seqlens': BOUNDS, 'position_ids': POSITIONS},
], ids=['lengths', 'all', 'cu_seqlens'])
def test_packed(names, device):
    """The bounds are taken as they are: a trace can't compare them with the positions beside them."""
    model = build(device).eval()
    names = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in names.items()}
    ids = torch.randint(3, 53, (1, 9), device=device)
    function, counter = compiled(model)
    with torch.no_grad():
        logits = function(ids, use_cache=False, **names).logits
        assert_equal({'logits': logits}, {'logits': model(ids, cu_seqlens=BOUNDS.to(device), use_cache=False).logits})
    assert counter.frame_count == 1


@pytest.mark.parametrize('name', ['position_ids', 'seq_idx'])
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


def test_graphs_of_packed_batches(device):
    """Any lengths and any number of sequences: as many graphs as the documentation says."""
    model, counter = build(device), CompileCounterWithBackend('aot_eager')
    function = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for bounds in ([0, 3, 20], [0, 5, 9, 30], [0, 3, 70, 80], [0, 40, 90], [0, 1, 2, 3, 200]):
        ids = torch.randint(3, 53, (1, bounds[-1]), device=device)
        function(ids, cu_seqlens=torch.tensor(bounds, device=device), use_cache=False)
    assert counter.frame_count == 3
