"""Longhorn in ordinary PyTorch: one loop over time, no kernels, nothing of fla and no Trainer.

It loads the weights of :class:`fla_longhorn.LonghornForCausalLM` by their names and trains them on the same batches. A curve
that differs from ours by more than rounding shows a mistake, in one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100


class Mixer(nn.Module):
    """Section 3.3 of the paper in Mamba's block, for one head; `exact` is Theorem 3.1."""

    def __init__(self, width: int, state_size: int, channels: int, rank: int, conv_size: int, exact: bool) -> None:
        super().__init__()
        self.sizes, self.exact = [rank, state_size, state_size], exact
        self.in_proj = nn.Linear(width, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, conv_size, padding=conv_size - 1, groups=channels)
        self.x_proj = nn.Linear(channels, sum(self.sizes), bias=False)
        self.beta_proj = nn.Linear(rank, channels)
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = nn.Linear(channels, width, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """`[B, T, width]` to the same shape."""
        T = h.shape[1]
        x, z = self.in_proj(h).chunk(2, dim=-1)
        v = F.silu(self.conv1d(x.mT)[..., :T].mT)
        b, k, q = self.x_proj(v).split(self.sizes, dim=-1)
        beta = torch.sigmoid(self.beta_proj(b))
        eps = beta / (1 + beta * (k * k).sum(-1, keepdim=True))
        S = v.new_zeros(v.shape[0], v.shape[2], k.shape[2])
        outputs = []
        for t in range(T):
            # [B, channels, 1] and [B, 1, state_size]
            v_t, eps_t, k_t, q_t = v[:, t, :, None], eps[:, t, :, None], k[:, t, None], q[:, t, None]
            if self.exact:
                S = S + eps_t * (v_t - (S * k_t).sum(-1, keepdim=True)) * k_t
            else:
                S = (1 - eps_t * k_t**2) * S + eps_t * v_t * k_t
            outputs.append((S * q_t).sum(-1))
        return self.out_proj((torch.stack(outputs, 1) + self.D * v) * F.silu(z))


class Block(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.attn = Mixer(
            width, config.state_size, round(width * config.expand), math.ceil(width / 16), config.conv_size, config.exact,
        )

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.attn(self.attn_norm(h))


class PlainLonghorn(nn.Module):
    """A language model with the sizes of `config`, a `LonghornConfig` of one head, and the names of its weights."""

    def __init__(self, config) -> None:
        super().__init__()
        self.model = nn.ModuleDict({
            'embeddings': nn.Embedding(config.vocab_size, config.hidden_size),
            'layers': nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
            'norm': nn.RMSNorm(config.hidden_size, eps=config.norm_eps),
        })
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[B, T]` to logits `[B, T, vocabulary]`."""
        h = self.model['embeddings'](ids)
        for block in self.model['layers']:
            h = block(h)
        return self.lm_head(self.model['norm'](h))


def train_plain(
    model: PlainLonghorn, batches: Iterable[dict[str, torch.Tensor]], steps: int, learning_rate: float, warmup_steps: int,
) -> list[float]:
    """The loss of each step, before it: AdamW without decay, a warm-up, a cosine to zero, and gradients clipped at 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.)
    losses = []
    for step, batch in zip(range(steps), batches, strict=False):
        share = (step - warmup_steps) / max(1, steps - warmup_steps)
        rate = step / warmup_steps if step < warmup_steps else (1 + math.cos(math.pi * share)) / 2
        for group in optimizer.param_groups:
            group['lr'] = learning_rate * rate
        logits = model(batch['input_ids'])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch['labels'][:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        losses.append(loss.item())
    return losses
