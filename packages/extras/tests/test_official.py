"""The authors' checkpoints."""

import pytest
import torch
import torch.nn.functional as F

from fla_longhorn import LonghornConfig, LonghornForCausalLM
from fla_longhorn_extras.official import convert_official_state_dict
from tests.layers.test_longhorn import written_out

# a block's parameters by the authors' names, width 32, 64 channels, rank 2, 16 numbers a channel
BLOCK = {
    'in_proj.weight': (128, 32), 'conv1d.weight': (64, 1, 4), 'conv1d.bias': (64,), 'x_proj.weight': (34, 64),
    'dt_head.weight': (64, 2), 'dt_head.bias': (64,), 'D': (64,), 'out_proj.weight': (32, 64),
}


def official_state_dict() -> dict[str, torch.Tensor]:
    shapes = {'embedding.weight': (40, 32), 'norm_f.weight': (32,)}
    for i in range(2):
        shapes[f'layers.{i}.norm.weight'] = (32,)
        shapes |= {f'layers.{i}.mixer.{name}': shape for name, shape in BLOCK.items()}
    state = {f'backbone.{name}': torch.randn(x) * (x[-1] ** -0.5 if len(x) > 1 else 1) for name, x in shapes.items()}
    return state | {'lm_head.weight': state['backbone.embedding.weight']}


def official_logits(state: dict[str, torch.Tensor], ids: torch.Tensor, model: LonghornForCausalLM) -> torch.Tensor:
    """The authors' model by its parameter names, computed in plain PyTorch; `model` has the sizes."""
    w = {name.removeprefix('backbone.'): x.to(ids.device) for name, x in state.items()}
    h = F.embedding(ids, w['embedding.weight'])
    for i, block in enumerate(model.model.layers):
        mixer = {name.replace('dt_head', 'beta_proj'): w[f'layers.{i}.mixer.{name}'] for name in BLOCK}
        h = h + written_out(block.attn, mixer, F.rms_norm(h, (32,), w[f'layers.{i}.norm.weight'], 1e-5))
    return F.linear(F.rms_norm(h, (32,), w['norm_f.weight'], 1e-5), w['lm_head.weight'])


@pytest.mark.parametrize('prefix', ['', 'transformer.', '_orig_mod.transformer.'])
def test_official_checkpoint(device, prefix):
    state, ids = official_state_dict(), torch.randint(40, (2, 70), device=device)
    model = LonghornForCausalLM(LonghornConfig(hidden_size=32, num_hidden_layers=2, vocab_size=40)).to(device)
    model.load_state_dict(convert_official_state_dict({prefix + name: x for name, x in state.items()}), strict=True)
    torch.testing.assert_close(model(ids).logits, official_logits(state, ids, model), rtol=1e-4, atol=1e-4)


def test_bad_official_checkpoint():
    with pytest.raises(ValueError, match="'backbone.layers.0.mixer.A_log', which is no parameter"):
        convert_official_state_dict({'backbone.layers.0.mixer.A_log': torch.ones(2)})
    with pytest.raises(ValueError, match="'model.norm.weight' twice, the second time as 'transformer.backbone.norm_f.weight'"):
        convert_official_state_dict({f'{p}backbone.norm_f.weight': torch.ones(2) for p in ('', 'transformer.')})
