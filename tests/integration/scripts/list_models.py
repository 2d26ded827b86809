"""How fla's own tools list its models, and the steps in which flame's train.py builds one from `--model.config`.

Arguments: the folder of such files and a device.
"""

import importlib
import sys
from pathlib import Path

import fla.models
import torch
from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from fla.ops.utils import prepare_position_ids
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

importlib.import_module('fla_longhorn')  # what flame does with --experimental.custom_model_path fla_longhorn

classes = [getattr(fla.models, name) for name in fla.models.__all__]
folder, device = Path(sys.argv[1]), sys.argv[2]
configs = {kind.model_type: kind for kind in classes if issubclass(kind, PretrainedConfig)}
assert configs['longhorn'].__name__ == 'LonghornConfig' and 'gla' in configs
model = AutoModelForCausalLM.from_config(
    configs['longhorn'](hidden_size=16, num_hidden_layers=1, vocab_size=32, attn_mode='chunk'),
)
assert type(model).__name__ == 'LonghornForCausalLM' and type(model) in classes



def build(path: Path, **smaller):
    config = AutoConfig.from_pretrained(path, **smaller)
    with torch.device('meta'):
        model = AutoModelForCausalLM.from_config(config)
        if getattr(config, 'fuse_cross_entropy', False):
            model.criterion = FusedLinearCrossEntropyLoss(num_chunks=8)
        model.apply(lambda module: setattr(module, '_is_hf_initialized', False))
    return model


for path in sorted(folder.glob('*.json')):
    model = build(path)
    assert model.config.model_type == 'longhorn'
    print(path.name, sum(weight.numel() for weight in model.parameters()))

# the smallest, made smaller, on a device: parallelised in place, then initialised, then trained on packed documents
torch.manual_seed(0)
model = build(folder / 'longhorn_120M.json', hidden_size=32, num_hidden_layers=2, vocab_size=300)
assert [name for name, _ in model.model.layers.named_children()] == ['0', '1']
model.to_empty(device=device)
with torch.no_grad():
    for weight in model.parameters():
        weight.fill_(float('nan'))
    model.post_init()
assert all(weight.isfinite().all() for weight in model.parameters())
model.train()
ids = torch.randint(300, (1, 96)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
# as its data loader and its loop make them
cu_seqlens = torch.tensor([0, 50, 96], dtype=torch.int32, device=device)
position_ids = prepare_position_ids(cu_seqlens).to(torch.int32)
for _ in range(8):
    loss = model(input_ids=ids, labels=ids, position_ids=position_ids, cu_seqlens=cu_seqlens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
