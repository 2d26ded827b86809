"""The layer: its equation, and the ways a sequence can reach it (whole, in pieces, padded, packed)."""

import pytest
import torch
import torch.nn.functional as F
from fla.models.utils import Cache

from fla_longhorn.layers import Longhorn
from fla_longhorn.modules import L2Norm
from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn.selfcheck.compare import relative_error

LAYERS = {
    'paper': {},
    'heads': {'num_heads': 2, 'state_size': 5},
    'scalar_beta': {'scalar_beta': True, 'num_heads': 4, 'state_size': 8},
    'exact': {'exact': True, 'num_heads': 2, 'state_size': 6},
    'allow_neg_eigval': {'allow_neg_eigval': True, 'num_heads': 2, 'state_size': 5},
    'allow_neg_eigval, exact': {'allow_neg_eigval': True, 'exact': True},
    'k_norm': {'k_norm': 'l2', 'num_heads': 2, 'state_size': 5},
    'k_norm, exact': {'k_norm': 'l2', 'exact': True, 'scalar_beta': True},
    'tie_qk, value_proj': {'tie_qk': True, 'value_proj': True, 'num_heads': 2, 'state_size': 5},
    'tie_qk, k_norm, exact': {'tie_qk': True, 'k_norm': 'l2', 'exact': True},
    'gate of heads': {'gate': 'head', 'num_heads': 2, 'exact': True},
    'gate of channels': {'gate': 'channel', 'num_heads': 2, 'scalar_beta': True},
    'bias': {'use_bias': True, 'conv_bias': False, 'conv_size': 3, 'expand': 1.5, 'beta_rank': 7},
}


def build(device, **options) -> Longhorn:
    """With parameters that training may give it: none is zero or one."""
    layer = Longhorn(**{'hidden_size': 24, 'state_size': 4, 'layer_idx': 0, **options})
    with torch.no_grad():
        for x in layer.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    return layer.to(device)


@pytest.fixture(params=list(LAYERS))
def layer(request, device):
    return build(device, **LAYERS[request.param])


def written_out(layer: Longhorn, p: dict[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    """The block's equation in plain PyTorch, with parameters `p` (the authors' models/longhorn.py, in our words)."""
    width, heads = layer.conv1d.kernel_size[0], layer.num_heads
    x, z = F.linear(h, p['in_proj.weight'], p.get('in_proj.bias')).chunk(2, -1)
    x = F.conv1d(
        F.pad(x.mT, (width - 1, 0)), p['conv1d.weight'], p.get('conv1d.bias'), groups=x.shape[-1],
    ).mT
    u = v = F.silu(x)
    # queries have no rows of their own where they are tied
    rows = layer.beta_rank + heads * layer.state_size
    y = F.linear(v, p['x_proj.weight'])
    b, k, q = y[..., :layer.beta_rank], y[..., layer.beta_rank:rows], y[..., -heads * layer.state_size:]
    assert y.shape[-1] - rows == (0 if layer.tie_qk else heads * layer.state_size)
    v = F.linear(v, p['v_proj.weight']) if 'v_proj.weight' in p else v
    beta = F.linear(b, p['beta_proj.weight'], p['beta_proj.bias']).sigmoid()
    q, k, v, z = (y.unflatten(-1, (heads, -1)) for y in (q, k, v, z))
    beta = beta if layer.scalar_beta else beta.unflatten(-1, (heads, -1))
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt() if isinstance(layer.k_norm, L2Norm) else k
    g = None
    if layer.gate is not None:
        x = F.linear(F.linear(u, p['gate.down.weight']), p['gate.up.weight']) + p['gate.dt_bias']
        g = -p['gate.A_log'].exp()[:, None] * F.softplus(x).unflatten(-1, (heads, -1))
        g = g[..., 0] if layer.gate.num_channels is None else g
    o, _ = naive_recurrent_longhorn(q, k, v, beta, exact=layer.exact, allow_neg_eigval=layer.allow_neg_eigval, g=g)
    o = (o + p['D'].unflatten(0, (heads, -1)) * v) * F.silu(z)
    return F.linear(o.flatten(-2), p['out_proj.weight'], p.get('out_proj.bias'))


@pytest.mark.parametrize('T', [1, 13, 70])
def test_equation(layer, T, device):
    """The output, and the gradients of the input and of every parameter, against float64."""
    h = torch.randn(2, T, 24, device=device, requires_grad=True)
    o, attentions, cache = layer(h)
    assert attentions is None
    assert cache is None
    named = {'h': h, **dict(layer.named_parameters())}
    exact = {name: x.detach().double().requires_grad_() for name, x in named.items()}
    expected = written_out(layer, exact, exact['h'])
    assert relative_error(o, expected) <= 1e-5
    do = torch.randn_like(o)
    got, ref = torch.autograd.grad(o, named.values(), do), torch.autograd.grad(expected, exact.values(), do.double())
    errors = {name: relative_error(x, y) for name, x, y in zip(named, got, ref, strict=True)}
    assert max(errors.values()) <= 1e-4, errors


def test_fresh_step_sizes():
    """Before training they lie around one half; D passes the values on."""
    layer = Longhorn(hidden_size=24)
    assert not layer.beta_proj.bias.any()
    assert layer.D.eq(1).all()


@pytest.mark.parametrize('pieces', [[9] + [1] * 5, [1] * 6, [2, 3, 1, 4], [70, 1, 2, 80]], ids=str)
def test_in_pieces(layer, device, pieces):
    """Prefill, then several tokens at a time or one, which updates the state in place, through fla's cache."""
    h = torch.randn(2, sum(pieces), 24, device=device)
    cache, parts, state = Cache(), [], None
    with torch.no_grad():
        whole, _, _ = layer(h)
        for part in h.split(pieces, 1):
            parts.append(layer(part, past_key_values=cache, use_cache=True)[0])
            before, state = state, cache[0]['recurrent_state']
            assert before is None or part.shape[1] > 1 or state is before
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == sum(pieces)
    assert state.dtype == torch.float32


def test_boundaries_win_over_mask(layer, device):
    h = torch.randn(1, 8, 24, device=device)
    cu_seqlens = torch.tensor([0, 3, 8], device=device)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]], device=device)
    assert torch.equal(layer(h, mask, cu_seqlens=cu_seqlens)[0], layer(h, cu_seqlens=cu_seqlens)[0])


def test_autocast(device):
    layer = Longhorn(hidden_size=32).to(device)
    h = torch.randn(2, 70, 32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        o, _, _ = layer(h)
    o.float().sum().backward()
    assert o.dtype == torch.bfloat16
    expected, _, _ = layer(h)
    assert (o - expected).norm() <= 2e-2 * expected.norm()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in layer.parameters())


@pytest.mark.parametrize('scale', [1e-2, 1e3])
def test_normalised_keys_have_no_scale(scale, device):
    """Each head's keys by themselves, whatever their size, in low precision too."""
    layer = Longhorn(hidden_size=32, num_heads=2, state_size=4, k_norm='l2').to(device, torch.float16)
    h = torch.randn(2, 70, 32, device=device, dtype=torch.float16)
    keys = slice(layer.beta_rank, layer.beta_rank + 8)
    with torch.no_grad():
        layer.x_proj.weight[keys] *= 10
        expected, _, _ = layer(h)
        layer.x_proj.weight[keys][:4] *= scale
        o, _, _ = layer(h)
    assert (o - expected).float().norm() <= 5e-3 * expected.float().norm()


def test_a_cache_needs_the_layers_index(device):
    with pytest.raises(ValueError, match='layer_idx'):
        Longhorn(hidden_size=24).to(device)(torch.randn(1, 4, 24, device=device), past_key_values=Cache(), use_cache=True)


@pytest.mark.parametrize('shape', [(2, 0, 16), (0, 5, 16)], ids=['no tokens', 'no rows'])
@pytest.mark.parametrize('use_cache', [False, True])
def test_nothing_to_mix(shape, use_cache, device):
    layer = Longhorn(hidden_size=16, layer_idx=0).to(device)
    with pytest.raises(ValueError, match=r'hidden_states must have the shape \[B, T, 16\] with at least one row'):
        layer(torch.randn(shape, device=device), use_cache=use_cache)
