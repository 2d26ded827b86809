"""The bidirectional mixer against its equation."""

import pytest
import timm
import torch
import torch.nn.functional as F

from fla_longhorn.contrib.timm import BidirectionalLonghorn
from fla_longhorn.ops import naive_recurrent_longhorn
from tests.contrib.timm.models import TINY

OPTIONS = [
    {}, dict(exact=True), dict(exact=True, allow_neg_eigval=True), dict(scalar_beta=True), dict(bidirectional=False),
    dict(expand=1, conv_size=2, state_size=5),
]


def build(device: torch.device, **options) -> BidirectionalLonghorn:
    mixer = BidirectionalLonghorn(24, **options)
    with torch.no_grad():
        for parameter in (mixer.D, mixer.beta_proj.bias, mixer.conv1d.bias):
            parameter.normal_()
    return mixer.to(device)


def equation(mixer: BidirectionalLonghorn, h: torch.Tensor) -> torch.Tensor:
    """The docstring's equation in float64, a direction after the other."""
    at = {name: x.detach().double() for name, x in mixer.named_parameters()}
    x, z = F.linear(h.double(), at['in_proj.weight']).chunk(2, -1)
    V, W, K, R = x.shape[-1], mixer.conv1d.weight.shape[-1], mixer.state_size, mixer.beta_rank
    outputs = []
    for g in range(mixer.directions):
        u = x.flip(1) if g else x
        rows = slice(g * V, (g + 1) * V)
        weight, bias = at['conv1d.weight'][rows], at['conv1d.bias'][rows]
        v = F.silu(F.conv1d(F.pad(u.mT, (W - 1, 0)), weight, bias, groups=V).mT)
        b, k, q = F.linear(v, at['x_proj.weight'][g]).split([R, K, K], -1)
        beta = torch.sigmoid(F.linear(b, at['beta_proj.weight'][g], at['beta_proj.bias'][g]))
        q, k, v = (y.unsqueeze(2) for y in (q, k, v))
        beta = beta if mixer.scalar_beta else beta.unsqueeze(2)
        o, _ = naive_recurrent_longhorn(q, k, v, beta, exact=mixer.exact, allow_neg_eigval=mixer.allow_neg_eigval)
        o = (o + at['D'][rows] * v).squeeze(2)
        outputs.append(o.flip(1) if g else o)
    return F.linear(sum(outputs) / len(outputs) * F.silu(z), at['out_proj.weight'])


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_equation(options, device):
    mixer, h = build(device, **options), torch.randn(2, 9, 24, device=device)
    expected = equation(mixer, h)
    assert (mixer(h) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize('option', [dict(state_size=0), dict(expand=0.3), dict(exact=1), dict(beta_rank=0)], ids=str)
def test_wrong_options(option):
    with pytest.raises((TypeError, ValueError), match=next(iter(option))):
        BidirectionalLonghorn(24, **option)


@pytest.mark.parametrize('gate', ['head', 'channel'])
def test_no_gate(gate):
    """An option of the layer that the mixer does not have, by name."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'gate'"):
        timm.create_model(TINY, gate=gate)
