"""Adapters and offloading on every projection: a module that is wrapped, hooked or elsewhere is called."""

import copy

import pytest
import torch
import torch.nn as nn
from accelerate import cpu_offload, disk_offload
from fla.modules.mlp import GatedMLP
from peft import LoraConfig, get_peft_model
from torch.nn.utils import parametrize

from fla_longhorn.attn_mode import FAMILIES
from tests.integration.swapped import make_model, spread, tokens, with_slow
from tests.models.test_cache import build

OWN = {
    'mlp': {'hidden_ratio': 2},
    'powlu': {'hidden_ratio': 2, 'hidden_act': 'powlu'},
    'unfused': {'hidden_ratio': 2, 'fuse_swiglu': False},
    'linear-loss': {'hidden_ratio': 2, 'fuse_cross_entropy': False, 'fuse_linear_cross_entropy': True},
    'gate-head': {'hidden_ratio': 2, 'gate': 'head', 'num_heads': 2},
    'exact-gate-channel': {'hidden_ratio': 2, 'gate': 'channel', 'exact': True, 'allow_neg_eigval': True},
}
# gates of fla's families
GATED = {'gla-gate': ('gla', {'longhorn_gate': 'head'}), 'rwkv7-gate': ('rwkv7', {'longhorn_gate': 'channel'})}
MODELS = [*OWN, *FAMILIES, *GATED]
models = pytest.mark.parametrize('name', with_slow(MODELS))


def make(name: str, device: torch.device) -> nn.Module:
    if name in OWN:
        return build(device, **OWN[name])
    family, options = GATED.get(name, (name, {}))
    return spread(make_model(family, device, **options))


def inputs(device: torch.device) -> torch.Tensor:
    return tokens(device, 2, 20) % 50


def results(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and loss; the two ways of a call that some losses have."""
    model.eval()
    with torch.no_grad():
        return model(ids).logits.clone(), model(ids, labels=ids).loss


def projections(model: nn.Module) -> list[str]:
    return sorted({name.split('.')[-1] for name, x in model.named_modules() if isinstance(x, nn.Linear)})


@models
def test_every_adapter_counts(name, device):
    """LoRA on any linear layer acts and learns before it is merged as after it."""
    base, ids = make(name, device), inputs(device)
    targets = projections(base)
    assert 'lm_head' in targets and ('down_proj' in targets or 'value' in targets)
    assert ({'down', 'up'} <= set(targets)) == ('gate' in name.split('-'))
    if base.config.tie_word_embeddings:
        # PEFT can't merge it
        targets.remove('lm_head')
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    unused = [name for name, x in model.named_parameters() if x.requires_grad and (x.grad is None or not x.grad.any())]
    assert not unused
    before = results(base, ids)
    adapted = results(model, ids)
    merged = results(model.merge_and_unload(), ids)
    for a, b, c in zip(before, adapted, merged, strict=True):
        assert (b - c).norm() <= 1e-4 * c.norm()
        assert (a - b).norm() > 1e-3 * c.norm()


@pytest.mark.parametrize('name', [*OWN, 'gla', 'linear_attn', 'rwkv7'])
def test_offloaded(name, tmp_path, device):
    model, ids = make(name, device), inputs(device)
    expected = results(model, ids)
    for offload in (lambda x: cpu_offload(x, device), lambda x: disk_offload(x, tmp_path, device)):
        for a, b in zip(results(offload(copy.deepcopy(model)), ids), expected, strict=True):
            # a head that is called computes the fused loss in PyTorch
            assert (a - b).norm() <= 1e-6 * b.norm()


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Wrapped(nn.Module):
    def __init__(self, module: nn.Linear):
        super().__init__()
        self.module, self.weight, self.bias = module, module.weight, module.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.module(x)


def doubled(function):
    return lambda *args: 2 * function(*args)


# the ways in which libraries change a module
CHANGES = {
    'hook': lambda mlp: mlp.down_proj.register_forward_hook(lambda module, args, output: 2 * output),
    'hook before': lambda mlp: mlp.down_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    'forward': lambda mlp: setattr(mlp.down_proj, 'forward', doubled(mlp.down_proj.forward)),
    'module': lambda mlp: setattr(mlp, 'down_proj', Wrapped(mlp.down_proj)),
    'weight': lambda mlp: parametrize.register_parametrization(mlp.down_proj, 'weight', Doubled()),
}


@pytest.mark.parametrize('change', CHANGES)
@pytest.mark.parametrize('name', ['mlp', 'powlu', 'gla'])
def test_changed(name, change, device):
    """In eager mode, and in a trace of it."""
    mlp = next(x for x in make(name, device).modules() if isinstance(x, GatedMLP))
    x = torch.randn(2, 5, mlp.hidden_size, device=device)
    expected = 2 * mlp(x)
    CHANGES[change](mlp)
    torch.compiler.reset()
    assert torch.equal(mlp(x), expected)
    compiled = torch.compile(mlp, backend='eager', fullgraph=True)(x)
    assert (compiled - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize('name', ['mlp', 'gla', 'exact-gate-channel', 'gla-gate'])
def test_adapters_of_the_rows(name, device):
    """PEFT serves a batch whose rows have adapters of their own: each module sees the rows."""
    base, ids = make(name, device), inputs(device)
    targets = [x for x in projections(base) if x != 'lm_head']
    assert 'beta_proj' in targets
    model = get_peft_model(base, LoraConfig(r=2, target_modules=targets, init_lora_weights=False), adapter_name='a').eval()
    model.add_adapter('b', LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    apart, new = [], []
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        for i, adapter in enumerate('ab'):
            model.set_adapter(adapter)
            apart.append(model(ids[i:i + 1]).logits)
            new.append(model.generate(input_ids=ids[i:i + 1], **options))
        names = ['a', 'b']
        together = model(ids, adapter_names=names).logits
        assert (together - torch.cat(apart)).norm() < 1e-5 * together.norm()
        assert torch.equal(model.generate(input_ids=ids, adapter_names=names, **options), torch.cat(new))
