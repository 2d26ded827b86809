"""A gate's own parameters where a model is made in parts: on `meta`, from a checkpoint without some of them, sharded."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from fla_longhorn.layers.gate import Gate
from tests.models.test_longhorn import small

FAMILIES = {
    'longhorn': lambda gate: small(gate=gate, num_heads=2),
    'gla': lambda gate: AutoConfig.for_model(
        'gla', hidden_size=32, num_hidden_layers=2, vocab_size=53, num_heads=2, attn_mode='longhorn', longhorn_gate=gate,
    ),
}
families = pytest.mark.parametrize('family', FAMILIES)
gates = pytest.mark.parametrize('gate', ['head', 'channel'])


def make(family, gate):
    """With parameters that no initialisation gives."""
    model = AutoModelForCausalLM.from_config(FAMILIES[family](gate))
    with torch.no_grad():
        for x in model.parameters():
            x.add_(3)
    return model


def gates_of(model):
    return [module for module in model.modules() if isinstance(module, Gate)]


def assert_fresh(gate, *names):
    wanted = dict(Gate(gate.down.in_features, gate.down.out_features, gate.num_heads, gate.num_channels).named_parameters())
    for name in names:
        x = getattr(gate, name)
        x = x.full_tensor() if hasattr(x, 'full_tensor') else x
        torch.testing.assert_close(x.detach().cpu(), wanted[name].detach())


@families
@gates
@pytest.mark.parametrize('missing', [
    ('A_log',), ('dt_bias',), ('A_log', 'dt_bias'), ('up.weight',), ('A_log', 'dt_bias', 'down.weight', 'up.weight'),
], ids=' '.join)
def test_missing_in_a_checkpoint(family, gate, missing, tmp_path, device):
    """What is missing is initialised, what is there is kept; all of it, where a checkpoint has no gate."""
    model = make(family, gate)
    state = {name: x for name, x in model.state_dict().items() if not name.endswith(tuple(f'gate.{x}' for x in missing))}
    wanted = {name: x.clone() for name, x in state.items()}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).to(device)
    assert gates_of(loaded)
    for module in gates_of(loaded):
        assert_fresh(module, *(name for name in missing if '.' not in name))
        assert all(x.abs().max() < 3 for name, x in module.named_parameters() if name in missing and '.' in name)
    found = loaded.state_dict()
    assert all(torch.equal(found[name].cpu(), x) for name, x in wanted.items())


@families
@gates
def test_a_gate_for_a_trained_model(family, gate, tmp_path, device):
    """The config of a checkpoint without a gate gets one; the other way round the gate is left out."""
    make(family, None).save_pretrained(tmp_path / 'none')
    config = FAMILIES[family](gate)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / 'none', config=config).to(device)
    for module in gates_of(loaded):
        assert_fresh(module, 'A_log', 'dt_bias')
    assert len(gates_of(loaded)) == len(loaded.model.layers)
    make(family, gate).save_pretrained(tmp_path / 'gated')
    assert not gates_of(AutoModelForCausalLM.from_pretrained(tmp_path / 'gated', config=FAMILIES[family](None)))


@gates
@pytest.mark.parametrize('family', ['longhorn', 'gla'])
def test_sharded_on_meta(family, gate, tmp_path):
    sharded_on_meta(family, gate, tmp_path, lambda model, mesh: fully_shard(model, mesh=mesh))


def sharded_on_meta(family, gate, tmp_path, shard):
    """Parameters that are DTensors before they have values."""
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        with torch.device('meta'):
            model = AutoModelForCausalLM.from_config(FAMILIES[family](gate))
        shard(model, init_device_mesh('cpu', (1,)))
        model.to_empty(device='cpu')
        for x in model.parameters():
            x.data.fill_(float('nan'))
        model.apply(model._init_weights)
        for module in gates_of(model):
            assert_fresh(module, 'A_log', 'dt_bias')
        assert all(torch.isfinite(x).all() for x in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
