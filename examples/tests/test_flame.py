"""fla's way of listing its models, and the steps in which flame's train.py builds one from `--model.config`."""

import fla.models
import torch
from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from fla.ops.utils import prepare_position_ids
from transformers import AutoConfig, AutoModelForCausalLM

from fla_longhorn import LonghornConfig
from tests.forks import ROOT


def test_built_by_flame(device):
    """Parallelised in place, then initialised, then given packed documents, as its data loader makes them."""
    assert LonghornConfig in [getattr(fla.models, name) for name in fla.models.__all__]
    config = AutoConfig.from_pretrained(
        ROOT / 'examples' / 'configs' / 'flame' / 'longhorn_120M.json', hidden_size=32, num_hidden_layers=2, vocab_size=300,
    )
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config)
        model.criterion = FusedLinearCrossEntropyLoss(num_chunks=8)
        model.apply(lambda module: setattr(module, '_is_hf_initialized', False))
    assert [name for name, _ in model.model.layers.named_children()] == ['0', '1']
    model.to_empty(device=device)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(float('nan'))
        model.post_init()
    ids = torch.randint(300, (1, 96), device=device)
    cu_seqlens = torch.tensor([0, 50, 96], dtype=torch.int32, device=device)
    position_ids = prepare_position_ids(cu_seqlens).to(torch.int32)
    model.train()(input_ids=ids, labels=ids, position_ids=position_ids, cu_seqlens=cu_seqlens).loss.backward()
    assert all(weight.grad.isfinite().all() and weight.grad.any() for weight in model.parameters())
