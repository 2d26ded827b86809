"""Small models of fla's families with Longhorn in place of their mixers."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fla_longhorn.attn_mode import FAMILIES
from fla_longhorn.layers import Longhorn
from tests.devices import slow_but

TINY = dict(hidden_size=64, num_hidden_layers=2, vocab_size=64, max_position_embeddings=128)
HEADS = dict(num_heads=2)
# what a family needs beyond TINY to be small
SIZES = {
    **dict.fromkeys(('delta_net', 'deltaformer', 'gla', 'linear_attn', 'retnet', 'rwkv6'), HEADS),
    **dict.fromkeys((
        'comba', 'cyclic_flow_attention', 'gated_deltanet', 'gated_deltaproduct', 'kda', 'mesa_net', 'mom',
        'precond_gated_deltanet', 'precond_kda', 'rwkv7',
    ), HEADS | dict(head_dim=32)),
    'hgrn': {},
    'hgrn2': dict(expand_ratio=32),
    'lightnet': dict(expand_ratio=32),
}
# what a family may have beside its mixer is in these; the tests of the others are slow
TELLING = ('gla', 'linear_attn', 'rwkv7')


def with_slow(names):
    """`names`, those of a family that is not among :data:`TELLING` marked slow."""
    return slow_but((x for x in names if x.split()[0] not in FAMILIES or x.split()[0] in TELLING), names)


families = pytest.mark.parametrize('family', with_slow(list(FAMILIES)))


def make_config(family, attn_mode='longhorn', **options):
    return AutoConfig.for_model(family, **TINY, **SIZES[family], attn_mode=attn_mode, **options)


def make_model(family, device, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(family, **options)).to(device)


def mixers(model):
    return [module for module in model.modules() if isinstance(module, Longhorn)]


def tokens(device, *shape, seed=1):
    return torch.randint(3, TINY['vocab_size'], shape, generator=torch.Generator().manual_seed(seed)).to(device)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def spread(model):
    """Larger weights, the same on every device, so that what the mixers remember shows in the logits."""
    with torch.no_grad():
        for mixer in mixers(model):
            stds = {x.weight: x.in_features ** -0.5 for x in (mixer.in_proj, mixer.x_proj, mixer.out_proj)}
            for weight, std in (stds | {mixer.conv1d.weight: 0.5}).items():
                weight.copy_(torch.empty(weight.shape).normal_(std=std))
    return model
