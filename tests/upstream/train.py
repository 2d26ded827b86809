"""`python -m tests.upstream.train DEVICE`: a training step and generation, by whatever Longhorn fla has, as JSON."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

import torch
from transformers import AutoModelForCausalLM

OPTIONS = {'diagonal': {}, 'exact': {'exact': True, 'num_heads': 2}}


def train(name: str, device: str, fused: bool) -> dict[str, Any]:
    """Loss, norms of the gradients, and tokens that are generated with and without a cache."""
    from fla.models import LonghornConfig

    torch.manual_seed(0)
    config = LonghornConfig(
        hidden_size=32, num_hidden_layers=2, state_size=4, hidden_ratio=2, vocab_size=29, fuse_cross_entropy=fused,
        **OPTIONS[name],
    )
    model = AutoModelForCausalLM.from_config(config).to(device)
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
    print(json.dumps({name: train(name, sys.argv[1], fused=not interpreting) for name in OPTIONS}))
