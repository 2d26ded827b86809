"""The layer under `torch.compile`: every way a sequence can reach it, in one graph, equal to eager."""

from itertools import product

import pytest
import torch
from fla.models.utils import Cache

from fla_longhorn.layers import Longhorn
from tests.devices import slow_but
from tests.layers.test_longhorn import build
from tests.torch_compile.graphs import assert_equal, compiled, gradients, read, weighted

LAYERS = {
    'paper': {},
    'heads': {'num_heads': 2, 'state_size': 5, 'mode': 'fused_recurrent'},
    'exact': {'exact': True, 'scalar_beta': True, 'num_heads': 4},
    'bias': {'use_bias': True, 'conv_bias': False, 'conv_size': 3, 'expand': 1.5, 'k_norm': 'l2'},
}
MASKS = {
    'left': [[0, 0, 0, 1, 1, 1, 1], [1] * 7, [0, 0, 0, 0, 0, 0, 1]],
    'right': [[1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0], [1] * 7],
    'middle': [[1, 0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0], [0] * 7],
}


def results(call, layer: Longhorn, h: torch.Tensor, cache: Cache | None = None, **options) -> dict[str, torch.Tensor]:
    """Output, states in the cache, and the gradients of the input and of every parameter."""
    h = h.detach().requires_grad_()
    o, _, cache = call(h, past_key_values=cache, use_cache=cache is not None, **options)
    outputs = {'o': o} if cache is None else {'o': o, **{k: x for k, x in cache[0].items() if x is not None}}
    weighed = (read(x) if name == 'conv_state' else x for name, x in outputs.items())
    return outputs | gradients(weighted(*weighed), [('h', h), *layer.named_parameters()])


def check(layer: Longhorn, h: torch.Tensor, make_cache=lambda: None, **options) -> None:
    expected = results(layer, layer, h, make_cache(), **options)
    function, counter = compiled(layer)
    assert_equal(results(function, layer, h, make_cache(), **options), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize(('name', 'T'), slow_but(zip(LAYERS, (70, 13) * 2, strict=True), product(LAYERS, (13, 70))))
def test_equals_eager(name, T, device):
    check(build(device, **LAYERS[name]), torch.randn(2, T, 24, device=device))


@pytest.mark.parametrize('lengths', [[5, 1, 0, 3], [2, 66, 7]], ids=str)
def test_packed(lengths, device):
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    check(build(device, **LAYERS['exact']), torch.randn(1, sum(lengths), 24, device=device), Cache, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize('dtype', [torch.long, torch.bool], ids=str)
def test_padding(dtype, device):
    """What is padding is not read; one graph for all masks."""
    layer = build(device, **LAYERS['bias'])
    function, counter = compiled(layer)
    for rows in MASKS.values():
        mask = torch.tensor(rows, device=device).to(dtype)
        h = torch.randn(3, 7, 24, device=device).masked_fill(mask[..., None] == 0, float('nan'))
        assert_equal(*(results(call, layer, h, Cache(), attention_mask=mask) for call in (function, layer)))
    assert counter.frame_count == 1


@pytest.mark.parametrize('padded', [False, pytest.param(True, marks=pytest.mark.slow)], ids=['', 'mask'])
def test_lengths_share_graphs(padded, device):
    """One for the first length seen and one for all up to 64 tokens, one for all above."""
    layer = build(device)
    function, counter = compiled(layer)
    for B, T in ((2, 9), (3, 20), (4, 64), (2, 33), (2, 65), (5, 130), (3, 80)):
        h = torch.randn(B, T, 24, device=device)
        mask = (torch.rand(B, T, device=device) < 0.7).long() if padded else None
        with torch.no_grad():
            assert_equal({'o': function(h, mask)[0]}, {'o': layer(h, mask)[0]})
    assert counter.frame_count == 3
