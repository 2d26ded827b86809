"""The authors' checkpoints."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_longhorn import LonghornConfig, LonghornForCausalLM, convert_official_state_dict
from fla_longhorn.ops import naive_recurrent_longhorn


class OfficialBlock(nn.Module):
    """The authors' block by its parameter names, computed in plain PyTorch."""

    def __init__(self, d: int, state: int):
        super().__init__()
        inner, rank = 2 * d, -(-d // 16)
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.mixer = nn.Module()
        self.mixer.in_proj = nn.Linear(d, 2 * inner, bias=False)
        self.mixer.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.mixer.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.mixer.dt_head = nn.Linear(rank, inner)
        self.mixer.out_proj = nn.Linear(inner, d, bias=False)
        self.mixer.D = nn.Parameter(torch.randn(inner))
        self.split = [rank, state, state]

    def forward(self, h):
        m = self.mixer
        x, z = m.in_proj(self.norm(h)).chunk(2, -1)
        x = F.silu(m.conv1d(x.mT)[..., :h.shape[1]].mT)
        dt, k, q = m.x_proj(x).split(self.split, -1)
        o, _ = naive_recurrent_longhorn(*(y[:, :, None] for y in (q, k, x, m.dt_head(dt).sigmoid())))
        return h + m.out_proj((o[:, :, 0] + m.D * x) * F.silu(z))


class OfficialModel(nn.Module):
    def __init__(self, vocab: int, d: int, layers: int, state: int):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embedding = nn.Embedding(vocab, d)
        self.backbone.layers = nn.ModuleList(OfficialBlock(d, state) for _ in range(layers))
        self.backbone.norm_f = nn.RMSNorm(d, eps=1e-5)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.backbone.embedding.weight

    def forward(self, ids):
        h = self.backbone.embedding(ids)
        for layer in self.backbone.layers:
            h = layer(h)
        return self.lm_head(self.backbone.norm_f(h))


@pytest.mark.parametrize('prefix', ['', 'transformer.', '_orig_mod.transformer.'])
def test_official_checkpoint(device, prefix):
    official = OfficialModel(vocab=40, d=32, layers=2, state=16).to(device)
    state_dict = {prefix + name: x for name, x in official.state_dict().items()}
    model = LonghornForCausalLM(LonghornConfig(hidden_size=32, num_hidden_layers=2, vocab_size=40)).to(device)
    model.load_state_dict(convert_official_state_dict(state_dict), strict=True)
    ids = torch.randint(40, (2, 70), device=device)
    torch.testing.assert_close(model(ids).logits, official(ids), rtol=1e-4, atol=1e-4)


def test_bad_official_checkpoint():
    with pytest.raises(ValueError, match="'backbone.layers.0.mixer.A_log', which is no parameter"):
        convert_official_state_dict({'backbone.layers.0.mixer.A_log': torch.ones(2)})
    with pytest.raises(ValueError, match="'model.norm.weight' twice, the second time as 'transformer.backbone.norm_f.weight'"):
        convert_official_state_dict({f'{p}backbone.norm_f.weight': torch.ones(2) for p in ('', 'transformer.')})
