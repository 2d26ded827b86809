"""`python -m tests.upstream.train DEVICE [NAME WEIGHTS]`: a training step and generation, by fla's Longhorn, as JSON."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

OPTIONS = {
    'diagonal': {'exact': False},
    'exact': {'exact': True, 'num_heads': 2},
    'gate': {'exact': True, 'num_heads': 2, 'gate': 'head', 'allow_neg_eigval': True},
    # of the first patch, which has one form
    'first': {'num_heads': 2},
    'first gate': {'num_heads': 2, 'gate': 'head', 'allow_neg_eigval': True},
}
CORE = ('diagonal', 'exact')


def train(
    name: str, device: str, fused: bool, weights: str | None = None, save: Path | None = None,
) -> dict[str, Any]:
    """Loss, norms of the gradients, and tokens that are generated with and without a cache."""
    from fla.models import LonghornConfig

    torch.manual_seed(0)
    config = LonghornConfig(
        hidden_size=32, num_hidden_layers=2, state_size=4, hidden_ratio=2, vocab_size=29, fuse_cross_entropy=fused,
        **OPTIONS[name],
    )
    model = AutoModelForCausalLM.from_config(config).to(device)
    if save is not None:
        torch.save(model.state_dict(), save)
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True))
    torch.manual_seed(1)
    tokens = torch.randint(29, (2, 70), device='cpu').to(device)
    loss = model.train()(tokens, labels=tokens).loss
    loss.backward()
    model.eval()
    options = {'max_new_tokens': 6, 'do_sample': False, 'pad_token_id': 0, 'eos_token_id': None}
    generated = [model.generate(tokens[:, :5], use_cache=use_cache, **options).tolist() for use_cache in (True, False)]
    gradients = {name: x.grad.norm().item() for name, x in model.named_parameters()}
    return {'loss': loss.item(), 'gradients': gradients, 'tokens': generated}


if __name__ == '__main__':
    interpreting = os.environ.get('TRITON_INTERPRET') == '1'
    if interpreting:
        import_module('tests.upstream.plugin')
    # fla's fused loss raises on the CPU
    device, *chosen = sys.argv[1:]
    name, weights = chosen or (None, None)
    print(json.dumps({x: train(x, device, fused=not interpreting, weights=weights) for x in ([name] if name else CORE)}))
