"""What backward computes again, in place of keeping it: fewer bytes, the same gradients, whatever wraps the layer."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode

from fla_longhorn import LonghornForCausalLM
from fla_longhorn.layers import Longhorn
from fla_longhorn.modules.cache import RewindableCache
from fla_longhorn.modules.recompute import Values
from fla_longhorn.ops import chunk_longhorn
from tests.models.test_longhorn import small

LAYERS = {
    'paper': {}, 'exact': {'exact': True, 'num_heads': 2}, 'scalar_beta': {'scalar_beta': True, 'num_heads': 2},
    'allow_neg_eigval': {'exact': True, 'allow_neg_eigval': True}, 'value_proj, k_norm': {'value_proj': True, 'k_norm': 'l2'},
}


def kept_bytes(call, module: nn.Module) -> int:
    """For backward; parameters left out."""
    storages: dict[torch.UntypedStorage, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = call()
    y.sum().backward()
    own = {x.untyped_storage() for x in module.parameters()}
    return sum(n for storage, n in storages.items() if storage not in own)


@pytest.fixture(params=[pytest.param('real', marks=pytest.mark.fla_kernels), 'meta', 'fake'])
def place(request, device):
    """Where modules have memory, and where people who estimate it have none."""
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode() if request.param == 'fake' else nullcontext():
        yield torch.device('meta') if request.param == 'meta' else device
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_kept_bytes(exact, place):
    """Of a token and channel, without the convolution's output and the step sizes: Mamba's fused block keeps 7."""
    kept = []
    for recompute in (False, True):
        with place:
            layer, h = Longhorn(hidden_size=256, exact=exact, recompute=recompute), torch.randn(1, 256, 256).requires_grad_()
        kept.append(kept_bytes(lambda: layer(h)[0], layer) / (256 * layer.intermediate_size))  # noqa: B023
    assert kept[0] == pytest.approx(kept[1] + 4) and kept[1] <= 7.8


@pytest.mark.parametrize('recompute', [False, True])
def test_the_operator_does_as_the_layer(recompute, monkeypatch):
    asked = []

    def op(*args, disable_recompute, **options):
        asked.append(disable_recompute)
        return chunk_longhorn(*args, disable_recompute=disable_recompute, **options)

    layer = Longhorn(hidden_size=8, state_size=4, exact=True, recompute=recompute)
    monkeypatch.setattr(layer, 'op_for', lambda T: op)
    layer(torch.randn(1, 3, 8))[0].sum().backward()
    assert asked == [not recompute]


@pytest.mark.parametrize('options', [{}, {'hidden_ratio': 2}, {'fuse_cross_entropy': False}], ids=str)
def test_kept_bytes_of_a_model(options, place):
    """Norms, MLP and loss in PyTorch keep no more than fla's kernels."""
    with place:
        model = LonghornForCausalLM(small(hidden_size=128, vocab_size=500, state_size=16, **options))
        ids = torch.randint(1, 500, (2, 256))
    kept = kept_bytes(lambda: model(ids, labels=ids).loss, model) / (2 * 256 * 128)
    assert kept <= (115 if options.get('hidden_ratio') else 70), kept


@pytest.mark.parametrize('form', ['rows', 'mask', 'packed', 'bfloat16', 'float16', 'cache'])
@pytest.mark.parametrize('name', list(LAYERS))
def test_gradients_of_a_layer(name, form, device):
    h = torch.randn(1 if form == 'packed' else 2, 70, 24, device=device)
    mask = torch.ones(2, 70, device=device)
    mask[0, :9] = 0
    options = {
        'mask': {'attention_mask': mask}, 'packed': {'cu_seqlens': torch.tensor([0, 40, 43, 70], device=device)},
    }.get(form, {})
    got = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layer = Longhorn(hidden_size=24, state_size=4, layer_idx=0, recompute=recompute, **LAYERS[name]).to(device)
        if form == 'cache':
            options = {'past_key_values': RewindableCache(), 'use_cache': True}
            with torch.no_grad():
                layer(h[:, :9], **options)
        x = h.clone().requires_grad_()
        # the dtype of autocast, where `form` names one
        dtype = getattr(torch, form, None)
        with torch.autocast(device.type, dtype) if dtype else nullcontext():
            o = layer(x, **options)[0]
        o.float().square().sum().backward()
        got.append([*(p.grad for p in layer.parameters()), x.grad])
    assert len(got[0]) > 5 and all(map(torch.equal, *got))


def double(module, args, output):
    return tuple(2 * x for x in output[:1]) + output[1:] if isinstance(output, tuple) else 2 * output


def hook_modules(model) -> None:
    for layer in model.model.layers:
        layer.attn.conv1d.register_forward_hook(double)
        layer.attn.beta_proj.register_forward_hook(double)


def adapt(model) -> None:
    get_peft_model(model, LoraConfig(target_modules=['beta_proj', 'in_proj'], lora_dropout=0.5, init_lora_weights=False))


AROUND = {
    'checkpoints': lambda model: model.gradient_checkpointing_enable({'use_reentrant': False}),
    'reentrant checkpoints': lambda model: model.gradient_checkpointing_enable({'use_reentrant': True}),
    'offloaded': lambda model: None, 'hooks': hook_modules, 'adapters': adapt,
}


@pytest.mark.parametrize('around', list(AROUND))
def test_gradients_of_a_model(around, device):
    """Those of a plain model: checkpoints and offloading have hooks of their own; modules that are changed are called."""
    ids = torch.randint(1, 53, (2, 70), device=device)
    got = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = LonghornForCausalLM(small(recompute=recompute)).to(device).train()
        if recompute or around in ('hooks', 'adapters'):
            AROUND[around](model)
        with torch.autograd.graph.save_on_cpu() if recompute and around == 'offloaded' else nullcontext():
            loss = model(ids, labels=ids).loss
        loss.backward()
        got.append([x.grad for x in model.parameters() if x.requires_grad])
    assert got[0] and all(map(torch.equal, *got))


def test_a_weight_changed_in_place_is_refused(device):
    """Also one that autograd does not keep, as where it is frozen."""
    layer = Longhorn(hidden_size=24).to(device).requires_grad_(False)
    layer.x_proj.requires_grad_()
    o = layer(torch.randn(2, 70, 24, device=device))[0]
    with torch.no_grad():
        layer.conv1d.weight.mul_(2)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        o.sum().backward()


def test_a_value_changed_in_place_is_kept(device):
    linear, x = nn.Linear(4, 4).to(device), torch.randn(9, 4, device=device)
    weight = torch.ones(9, 4, device=device, requires_grad=True)
    with Values() as values:
        y = linear(x).detach()
        values.add(y, F.linear, x, linear.weight, linear.bias)
        y.mul_(2)
        loss = (weight * y).sum()
    assert torch.equal(torch.autograd.grad(loss, weight)[0], 2 * linear(x))


@pytest.mark.parametrize('trained', ['model.layers.1.mlp', 'model.layers.0.attn.conv1d', 'lm_head'])
def test_frozen_but_for_a_part(trained, device):
    """As in fine-tuning: what lies before the part needs no gradients."""
    torch.manual_seed(0)
    model = small(num_hidden_layers=2, hidden_ratio=2, tie_word_embeddings=False)
    model = LonghornForCausalLM(model).to(device).requires_grad_(False)
    ids = torch.randint(model.config.vocab_size, (2, 9), device=device)
    weights = [*model.get_submodule(trained).requires_grad_().parameters()]
    gradients = [torch.autograd.grad(model(ids, labels=ids).loss, weights)]
    for layer in model.model.layers:
        layer.attn.recompute = False
    gradients.append(torch.autograd.grad(model(ids, labels=ids).loss, weights))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)
    assert all(x.any() for x in gradients[0])
