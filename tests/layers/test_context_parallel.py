"""Context parallelism of the layer: four ranks against one, and the calls that it refuses.

`python -m tests.layers.test_context_parallel` is what the ranks run: what differs is an error.
"""

import pytest
import torch
import torch.distributed as dist
from fla.models import GLAConfig
from fla.ops.cp import build_cp_context
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from fla_longhorn import Longhorn, LonghornConfig
from fla_longhorn.modules.context_parallel import convolve_part
from fla_longhorn.selfcheck.compare import relative_error
from tests import forks
from tests.ops.context_parallel.test_op import context
from tests.ranks import fork

LAYERS = {
    'paper': {},
    'heads': {'num_heads': 2, 'state_size': 5, 'mode': 'fused_recurrent'},
    'scalar_beta': {'scalar_beta': True, 'num_heads': 4, 'state_size': 8},
    'exact': {'exact': True, 'num_heads': 2, 'state_size': 6},
    'bias': {'use_bias': True, 'conv_bias': False, 'conv_size': 3, 'expand': 1.5, 'k_norm': 'l2'},
    'no look back': {'conv_size': 1},
    'gate per head': {'gate': 'head', 'num_heads': 2, 'state_size': 6},
    'exact, gate per channel': {'exact': True, 'gate': 'channel', 'num_heads': 2, 'state_size': 6},
}
# of the sequences, for four ranks: boundaries anywhere, and on the edges of ranks and next to them
RAGGED, EDGES = (3, 60, 8, 1, 208), (70, 71, 68, 71)
# also two tokens a rank, fewer than the convolution sees, and one
LENGTHS = [(280,), RAGGED, EDGES, (1, 7), (4,)]


def verify(name: str, lengths: tuple[int, ...], checkpointed: bool = False) -> None:
    """On rank 0, the output, the input's gradient and each parameter's, summed over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layer = Longhorn(hidden_size=24, layer_idx=0, **LAYERS[name])
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    h, do = torch.randn(2, 1, sum(lengths), 24)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)

    def run(h, do, checkpointed=False, **options):
        layer.zero_grad()
        h = h.clone().requires_grad_()
        o = checkpoint(layer, h, use_reentrant=False, **options)[0] if checkpointed else layer(h, **options)[0]
        o.backward(do)
        with torch.no_grad():
            without_grad = layer(h, **options)[0]
        grads = {x: p.grad.clone() for x, p in layer.named_parameters()}
        return {'o': o.detach(), 'o without grad': without_grad, 'h': h.grad, **grads}

    part = run(
        *(x.chunk(size, 1)[rank] for x in (h, do)), checkpointed, cp_context=build_cp_context(cu_seqlens, dist.group.WORLD),
    )
    parts = [None] * size if rank == 0 else None
    dist.gather_object(part, parts)
    if rank > 0:
        return
    ref = run(h, do, cu_seqlens=cu_seqlens)
    for x in ref:
        of_ranks, is_output = [p[x] for p in parts], x in ('o', 'o without grad')
        error = relative_error(torch.cat(of_ranks, 1) if is_output or x == 'h' else sum(of_ranks), ref[x])
        assert error <= (1e-5 if is_output else 1e-4), (name, lengths, checkpointed, x, error)


def main() -> None:
    for name in LAYERS:
        for lengths in LENGTHS:
            verify(name, lengths)
    for name in ('paper', 'exact'):
        verify(name, RAGGED, checkpointed=True)


def test_equals_one_rank():
    forks.output('-m', 'tests.layers.test_context_parallel')


@pytest.fixture
def layer(device):
    return Longhorn(hidden_size=16, layer_idx=0).to(device)


@pytest.fixture
def h(device):
    return torch.randn(1, 6, 16, device=device)


def test_without_a_group(layer, h, device):
    assert torch.equal(layer(h, cp_context=context(device))[0], layer(h, cu_seqlens=context(device).cu_seqlens)[0])


def test_a_context_without_tokens_to_look_back(layer, h, device):
    with pytest.raises(ValueError, match='cp_context must hold pre_num_conv_tokens'):
        convolve_part(layer.conv1d, torch.cat([h, h], -1), context(device, group='not asked'))


@pytest.mark.parametrize('change, error, message', [
    ({'use_cache': True}, ValueError, 'cp_context .*attention_mask must be None, and use_cache False'),
    ({'attention_mask': torch.ones(1, 6)}, ValueError, 'cp_context .*attention_mask must be None, and use_cache False'),
    ({'hidden_states': torch.randn(2, 6, 16)}, ValueError, 'cp_context.cu_seqlens packs all sequences into one row'),
    ({'cp_context': '2'}, TypeError, 'cp_context must be a fla.ops.cp.FLACPContext or None, got str'),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else '')
def test_bad_call(change, error, message, layer, h, device):
    change = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
    with pytest.raises(error, match=message):
        layer(**{'hidden_states': h, 'cp_context': context(device), **change})


@pytest.mark.parametrize(('kind', 'options'), [
    (LonghornConfig, {}), (GLAConfig, dict(attn_mode='longhorn', num_heads=2)),
], ids=['longhorn', 'gla'])
def test_attention_layers_are_refused(kind, options, device):
    config = kind(hidden_size=32, num_hidden_layers=2, vocab_size=20, attn={'layers': [1], 'num_heads': 2}, **options)
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    with pytest.raises(ValueError, match='cp_context must be None with attention layers'):
        model(torch.randint(20, (1, 6), device=device), cp_context=context(device))


if __name__ == '__main__':
    fork(main, 4)
