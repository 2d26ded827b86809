"""What is hooked or adapted in a padded batch sees its rows: each as it is alone, in the columns where its tokens are."""

from itertools import product

import pytest
import torch
import torch.nn as nn
from peft import LoraConfig, get_peft_model

from fla_longhorn.layers.gate import Gate
from fla_longhorn.modules import L2Norm, RMSNorm, ShortConvolution
from tests.devices import slow_but
from tests.models.test_cache import build, make, near

PARTS = {'value_proj': True, 'k_norm': 'l2', 'num_heads': 2, 'hidden_ratio': 2, 'use_bias': True}
OWN = {
    'diagonal': {'gate': 'head', **PARTS},
    'exact': {'exact': True, 'gate': 'channel', **PARTS},
    'hybrid': {'attn': {'layers': [1], 'num_heads': 2}, **PARTS},
    'window': {'attn': {'layers': [1], 'num_heads': 2, 'window_size': 4}, **PARTS},
}
MODELS = (*OWN, 'gla', 'gla hybrid', 'rwkv7 hybrid')
# the parts of which each model has some
MIXER = {'in_proj', 'conv1d', 'x_proj', 'beta_proj', 'out_proj'}
NAMES = {
    'diagonal': MIXER | {'v_proj', 'k_norm', 'gate', 'down', 'up', 'gate_proj', 'up_proj', 'down_proj'},
    'hybrid': MIXER | {'v_proj', 'k_norm', 'q_proj', 'k_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'},
}
T = 12
PADDING = {'left': slice(0, 4), 'right': slice(9, T), 'between': slice(5, 7)}
walk = pytest.mark.parametrize(('name', 'place'), slow_but(
    [*product(('diagonal', 'hybrid'), PADDING), ('exact', 'left'), ('gla hybrid', 'between')], product(MODELS, PADDING),
))


def of(name: str, device) -> nn.Module:
    return build(device, num_hidden_layers=2, **OWN[name]) if name in OWN else make(name, device)


def batch(place: str, device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 50, (3, T), device=device)
    mask = torch.ones_like(ids)
    mask[0, PADDING[place]] = 0
    mask[1, :2] = 0
    return ids, mask


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, ShortConvolution, Gate, RMSNorm, nn.RMSNorm, L2Norm)
    return {name: x for name, x in model.named_modules() if isinstance(x, kinds) and name != 'lm_head'}


def first(values) -> torch.Tensor:
    return first(next(iter(values))) if isinstance(values, tuple) else values


class Seen:
    """Inputs and outputs of modules, by hooks."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.handles = []
        for name, module in modules.items():
            self.handles += [
                module.register_forward_pre_hook(self.before(name), with_kwargs=True),
                module.register_forward_hook(self.after(name)),
            ]

    def before(self, name: str):
        def hook(module, args, kwargs):
            self.values[f'{name} input'] = args[0] if args else kwargs['x']

        return hook

    def after(self, name: str):
        def hook(module, args, output):
            self.values[f'{name} output'] = first(output)

        return hook

    def take(self) -> dict[str, torch.Tensor]:
        values, self.values = self.values, {}
        return values

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize('use_cache', [False, True], ids=['', 'cache'])
@walk
@torch.no_grad()
def test_hooks(name, place, use_cache, device):
    """Of each module alone, and of all of them."""
    model, (ids, mask) = of(name, device), batch(place, device)
    parts, wrong = parts_of(model), []
    assert {x.split('.')[-1] for x in parts} >= NAMES.get(name, MIXER)
    for hooked in ({}, *({x: module} for x, module in parts.items()), parts):
        seen = Seen(hooked)
        logits, got = model(ids, mask, use_cache=use_cache).logits, seen.take()
        for i, kept in enumerate(mask.bool()):
            want = {'logits': model(ids[i][kept][None], use_cache=False).logits, **seen.take()}
            for x, y in {'logits': logits, **got}.items():
                if y.shape[:2] != (3, T) or not near(y[i][kept], want[x][0]):
                    wrong.append((x, list(y.shape), i))
        seen.remove()
    assert not wrong


@walk
def test_gradients(name, place, device):
    """Of a batch whose layers keep their rows, as of one whose layers pack the tokens."""
    model, (ids, mask) = of(name, device).train(), batch(place, device)
    labels = torch.where(mask == 0, -100, ids)

    def gradients() -> torch.Tensor:
        model.zero_grad()
        model(ids, mask, labels=labels).loss.backward()
        return torch.cat([x.grad.flatten() for x in model.parameters()])

    want = gradients()
    for part in ('in_proj', 'conv1d', 'beta_proj', 'out_proj'):
        seen = Seen({x: module for x, module in parts_of(model).items() if x.endswith(part)})
        got = gradients()
        seen.remove()
        assert (got - want).norm() <= 1e-4 * want.norm()


@walk
@torch.no_grad()
def test_an_adapter_for_each_row(name, place, device):
    """PEFT's mixed batches, with adapters of one projection and of all."""
    ids, mask = batch(place, device)
    targets = sorted({x.split('.')[-1] for x, part in parts_of(of(name, device)).items() if isinstance(part, nn.Linear)})
    rows = ['a', 'b', '__base__']
    for chosen in (*([x] for x in targets), targets):
        config = LoraConfig(r=2, target_modules=chosen, init_lora_weights=False)
        model = get_peft_model(of(name, device), config, adapter_name='a').eval()
        model.add_adapter('b', config)
        got = model(ids, attention_mask=mask, adapter_names=rows).logits
        for i, (row, kept) in enumerate(zip(rows, mask.bool(), strict=True)):
            alone = model(ids[i][kept][None], adapter_names=[row]).logits
            assert near(got[i][kept], alone[0]), (chosen, i)
        if chosen is targets and place == 'left':
            options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
            new = model.generate(input_ids=ids, attention_mask=mask, adapter_names=rows, **options)[:, T:]
            for i, (row, kept) in enumerate(zip(rows, mask.bool(), strict=True)):
                alone = model.generate(input_ids=ids[i][kept][None], adapter_names=[row], **options)
                assert torch.equal(new[i], alone[0, -4:])
