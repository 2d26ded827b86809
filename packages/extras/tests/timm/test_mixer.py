"""The bidirectional mixer against its equation."""


import pytest
import torch
import torch.nn.functional as F

from fla_longhorn.layers import Longhorn
from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn_extras.timm import BidirectionalLonghorn
from packages.extras.tests.timm.models import draw_start_values

OPTIONS = [
    {}, dict(exact=True), dict(exact=True, allow_neg_eigval=True), dict(scalar_beta=True), dict(bidirectional=False),
    dict(expand=1, conv_size=2, state_size=5), dict(gate='head', expand=1, conv_size=2, state_size=5, beta_rank=3),
    dict(gate='channel', exact=True), dict(gate='channel', bidirectional=False, scalar_beta=True, allow_neg_eigval=True),
]


def build(device: torch.device, **options) -> BidirectionalLonghorn:
    # decays of a few tokens instead of hundreds
    return draw_start_values(BidirectionalLonghorn(24, **options), 'dt_bias').to(device)


def equation(mixer: BidirectionalLonghorn, h: torch.Tensor) -> torch.Tensor:
    """The docstring's equation in float64, a direction after the other."""
    at = {name: x.double() for name, x in mixer.named_parameters()}
    x, z = F.linear(h.double(), at['in_proj.weight']).chunk(2, -1)
    V, W, K, R = x.shape[-1], mixer.conv1d.weight.shape[-1], mixer.state_size, mixer.beta_rank
    outputs = []
    for i in range(mixer.directions):
        u = x.flip(1) if i else x
        rows = slice(i * V, (i + 1) * V)
        weight, bias = at['conv1d.weight'][rows], at['conv1d.bias'][rows]
        v = F.silu(F.conv1d(F.pad(u.mT, (W - 1, 0)), weight, bias, groups=V).mT)
        b, k, q = F.linear(v, at['x_proj.weight'][i]).split([R, K, K], -1)
        beta = torch.sigmoid(F.linear(b, at['beta_proj.weight'][i], at['beta_proj.bias'][i]))
        g = None
        if mixer.gate is not None:
            down, up, A_log, dt_bias = (at[f'gate.{i}.{name}'] for name in ('down.weight', 'up.weight', 'A_log', 'dt_bias'))
            g = -A_log.exp() * F.softplus(F.linear(F.linear(v, down), up) + dt_bias)
            g = g if g.shape[-1] == 1 else g.unsqueeze(2)
        q, k, v = (y.unsqueeze(2) for y in (q, k, v))
        beta = beta if mixer.scalar_beta else beta.unsqueeze(2)
        o, _ = naive_recurrent_longhorn(q, k, v, beta, exact=mixer.exact, allow_neg_eigval=mixer.allow_neg_eigval, g=g)
        o = (o + at['D'][rows] * v).squeeze(2)
        outputs.append(o.flip(1) if i else o)
    return F.linear(sum(outputs) / len(outputs) * F.silu(z), at['out_proj.weight'])


def check(mixer: BidirectionalLonghorn, h: torch.Tensor) -> None:
    """Outputs and the gradients of all parameters."""
    found, expected = mixer(h), equation(mixer, h)
    gradients = [torch.autograd.grad(o.square().sum(), list(mixer.parameters())) for o in (found, expected)]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    # a sum of which nothing is left keeps the error of its terms
    least = 1e-4 * max(y.abs().max() for y in gradients[1])
    for (name, _), x, y in zip(mixer.named_parameters(), *gradients, strict=True):
        assert (x - y).abs().max() < 1e-4 * y.abs().max().clamp(min=least), name


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_equation(options, device):
    check(build(device, **options), torch.randn(2, 9, 24, device=device))


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_layers(options, device):
    """A mixer is the mean of a layer over the tokens and of another over the reversed tokens."""
    mixer, h = build(device, **options), torch.randn(2, 9, 24, device=device)
    V, outputs = mixer.out_proj.in_features, []
    for i in range(mixer.directions):
        state = {}
        for name, x in mixer.state_dict().items():
            if name.startswith('gate.'):
                owner, name = int(name.split('.')[1]), 'gate.' + name.split('.', 2)[2]
                if owner != i:
                    continue
            elif name.startswith(('x_proj', 'beta_proj')):
                x = x[i]
            elif name.startswith(('conv1d', 'D')):
                x = x[i * V:(i + 1) * V]
            state[name] = x
        layer = Longhorn(hidden_size=24, **{x: y for x, y in options.items() if x != 'bidirectional'}).to(device)
        layer.load_state_dict(state)
        outputs.append(layer(h.flip(1))[0].flip(1) if i else layer(h)[0])
    torch.testing.assert_close(mixer(h), sum(outputs) / len(outputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    'option', [dict(state_size=0), dict(expand=0.3), dict(exact=1), dict(beta_rank=0), dict(gate='key')], ids=str,
)
def test_wrong_options(option):
    with pytest.raises((TypeError, ValueError), match=next(iter(option))):
        BidirectionalLonghorn(24, **option)
