"""Context parallelism of the layer: four ranks against one. Initialisation of a sharded model from the meta device."""

import json

import pytest
import torch
from fla.models import GLAConfig
from fla.ops.cp import FLACPContext
from transformers import AutoModelForCausalLM

from fla_longhorn import Longhorn, LonghornConfig, LonghornForCausalLM
from fla_longhorn.modules.context_parallel import convolve_part
from tests.distributed.process import run
from tests.distributed.scripts.layer import CHECKPOINTED, LAYERS, LENGTHS

pytestmark = pytest.mark.xdist_group('context parallel layer')


@pytest.fixture(scope='module')
def found(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp('layer') / 'found.json'
    run('-m', 'tests.distributed.scripts.layer', 4, path)
    return json.loads(path.read_text())


@pytest.mark.parametrize('name, case', [
    *((name, case) for name in LAYERS for case in LENGTHS), *((name, 'checkpointed') for name in CHECKPOINTED),
])
def test_equals_one_rank(found, name, case):
    errors = found['errors'][f'{name}, {case}']
    parameters = [x for x, _ in Longhorn(hidden_size=24, **LAYERS[name]).named_parameters()]
    assert set(errors) == {'o', 'o without grad', 'h', *parameters}
    assert errors.pop('o') <= 1e-5
    assert errors.pop('o without grad') <= 1e-5
    assert max(errors.values()) <= 1e-4, errors


def test_initialisation_from_meta(found):
    """FSDP2 on `meta`, `to_empty`, `init_weights`: the distributions are those of a model made the usual way."""
    init = found['init']
    assert init['tied']
    assert init['shards differ']
    model = LonghornForCausalLM(LonghornConfig(hidden_size=64, num_hidden_layers=2, vocab_size=256))
    expected = dict(model.named_parameters())
    assert set(expected) == set(init['std'])
    for name, x in expected.items():
        assert init['std'][name] == pytest.approx(x.std().item(), rel=0.15), name
        assert init['max'][name] == pytest.approx(x.abs().max().item(), rel=0.25), name
        assert init['mean'][name] == pytest.approx(x.mean().item(), abs=0.05), name


def context(device, **changes) -> FLACPContext:
    cu_seqlens = torch.tensor([0, 2, 6], device=device)
    return FLACPContext(**{'cu_seqlens': cu_seqlens, 'pre_num_ranks': 0, 'post_num_ranks': 0, **changes})


@pytest.fixture
def layer(device):
    return Longhorn(hidden_size=16, layer_idx=0).to(device)


@pytest.fixture
def h(device):
    return torch.randn(1, 6, 16, device=device)


def test_without_a_group(layer, h, device):
    assert torch.equal(layer(h, cp_context=context(device))[0], layer(h, cu_seqlens=context(device).cu_seqlens)[0])


@pytest.mark.parametrize('name', ['use_cache', 'attention_mask'])
def test_no_mask_and_no_cache(name, layer, h, device):
    options = {'use_cache': True} if name == 'use_cache' else {name: torch.ones(1, 6, device=device)}
    with pytest.raises(ValueError, match='cp_context .*attention_mask must be None, and use_cache False'):
        layer(h, cp_context=context(device), **options)


def test_rows(layer, h, device):
    with pytest.raises(ValueError, match='cp_context.cu_seqlens packs all sequences into one row'):
        layer(h.expand(2, -1, -1), cp_context=context(device))


def test_not_a_context(layer, h):
    with pytest.raises(TypeError, match='cp_context must be a fla.ops.cp.FLACPContext or None, got str'):
        layer(h, cp_context='2')


def test_a_context_without_tokens_to_look_back(layer, h, device):
    with pytest.raises(ValueError, match='cp_context must hold pre_num_conv_tokens'):
        convolve_part(layer.conv1d, torch.cat([h, h], -1), context(device, group='not asked'))


def test_attention_layers_are_refused(device):
    model = LonghornForCausalLM(LonghornConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=20, attn={'layers': [1], 'num_heads': 2},
    )).to(device)
    with pytest.raises(ValueError, match='cp_context must be None with attention layers'):
        model(torch.randint(20, (1, 6), device=device), cp_context=context(device))


def test_attention_in_a_swapped_family(device):
    config = GLAConfig(
        attn_mode='longhorn', attn={'layers': [1], 'num_heads': 2}, hidden_size=32, num_heads=2, num_hidden_layers=2,
        vocab_size=20,
    )
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    with pytest.raises(ValueError, match='cp_context must be None with attention layers'):
        model(torch.randint(20, (1, 6), device=device), cp_context=context(device))
