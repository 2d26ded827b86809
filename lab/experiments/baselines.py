"""Baselines of zoology's Figure 2 (arXiv 2312.04927) in PyTorch, with its sizes and initialisation.

Based (arXiv 2402.18668), Hyena (2302.10866), BaseConv (2312.04927) and RWKV-4 (2305.13048). Models have tied embeddings, no
positions and no MLP. With LN for a layer norm, a block computes from its input h

    h = h + mixer(LN(h)),    h = h + LN(h)

where the second step is zoology's block with an identity instead of the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def long_convolution(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """`y[t] = sum_s taps[s] * x[t - s]` over all of the past, for `x` `[B, T, D]` and `taps` `[T, D]`."""
    T = x.shape[1]
    spectrum = torch.fft.rfft(x, n=2 * T, dim=1) * torch.fft.rfft(taps, n=2 * T, dim=0)
    return torch.fft.irfft(spectrum, n=2 * T, dim=1)[:, :T]


def waves(length: int) -> torch.Tensor:
    """Features of each position for an implicit filter, `[length, 3]`: its share of the length, a slow cosine and sine."""
    angle = 1e-4 * 2 * math.pi * torch.arange(length) / length
    return torch.stack([torch.linspace(0, 1, length), angle.cos(), -angle.sin()], dim=-1)


class CausalConvolution(nn.Conv1d):
    """A causal depthwise convolution on `[B, T, D]`."""

    def __init__(self, width: int, size: int = 3) -> None:
        super().__init__(width, width, size, groups=width, padding=size - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mT)[..., :x.shape[1]].mT


class ImplicitConvolution(nn.Module):
    """A convolution as long as the sequence, with taps that an MLP computes from their position, plus its input."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.register_buffer('positions', waves(length))
        self.filter = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return long_convolution(x, self.filter(self.positions[:x.shape[1]])) + x


class BaseConv(nn.Module):
    """A convolution times a projection, plus the input: short and long convolutions alternate, or `short` only."""

    def __init__(self, width: int, length: int, layer: int, short: bool = False) -> None:
        super().__init__()
        self.projection = nn.Linear(width, width)
        self.conv = CausalConvolution(width) if short or layer % 2 == 0 else ImplicitConvolution(width, length)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * self.projection(x) + x


class Sine(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.frequency * x)


class Hyena(nn.Module):
    """Two gates around a long convolution, with taps from an MLP of sines under an exponential window."""

    def __init__(self, width: int, length: int, layer: int, order: int = 64) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.short_conv = CausalConvolution(3 * width)
        sine = Sine(order)
        self.filter = nn.Sequential(
            nn.Linear(3, order), sine, nn.Linear(order, order), sine, nn.Linear(order, order), sine,
            nn.Linear(order, width, bias=False),
        )
        self.D = nn.Parameter(torch.randn(width))
        self.positions = nn.Parameter(waves(length))
        # decays to 1% after 1.5 lengths in the slowest channel, after 0.3 in the fastest
        rates = -math.log(1e-2) * torch.linspace(1 / 1.5, 1 / 0.3, width)
        self.register_buffer('window', torch.exp(-torch.linspace(0, 1, length)[:, None] * rates))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        T = x.shape[1]
        a, b, v = self.short_conv(self.in_proj(x)).chunk(3, dim=-1)
        v = v * a
        v = long_convolution(v, self.filter(self.positions[:T]) * self.window[:T]) + self.D * v
        return self.out_proj(v * b)


def taylor(x: torch.Tensor) -> torch.Tensor:
    """Features whose products are `1 + s + s^2 / 2` for `s = q @ k / sqrt(d)`: the exponential's first terms."""
    d = x.shape[-1]
    squares = (x[..., :, None] * x[..., None, :]).flatten(-2)
    return torch.cat([torch.ones_like(x[..., :1]), x * d**-0.25, squares * (2 * d)**-0.5], dim=-1)


class TaylorAttention(nn.Module):
    """Based's linear attention: one head, 8 features for q and k before the Taylor map, divided by the sum of weights."""

    def __init__(self, width: int, features: int = 8) -> None:
        super().__init__()
        self.q_proj, self.k_proj = (nn.Linear(width, features, bias=False) for _ in range(2))
        self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (taylor(self.q_proj(x)) @ taylor(self.k_proj(x)).mT).tril()
        return self.o_proj(weights @ self.v_proj(x) / (weights.sum(-1, keepdim=True) + 1e-12))


def based(width: int, length: int, layer: int) -> nn.Module:
    """Short BaseConv and Taylor attention, alternating."""
    return TaylorAttention(width) if layer % 2 else BaseConv(width, length, layer, short=True)


class RWKV4(nn.Module):
    """Time mixing of RWKV-4: a mean of all values, weighted by `exp(k)` and a decay per channel."""

    def __init__(self, width: int, length: int, layer: int, layers: int = 12) -> None:
        super().__init__()
        # the authors' initialisation, for a model of 12 layers as in zoology
        depth, rest = layer / (layers - 1), 1 - layer / layers
        channel = torch.arange(width) / width
        self.decay = nn.Parameter(-5 + 8 * (torch.arange(width) / (width - 1)) ** (0.7 + 1.3 * depth))
        self.first = nn.Parameter(math.log(0.3) + 0.5 * ((torch.arange(width) + 1) % 3 - 1))
        self.mix_k, self.mix_r = nn.Parameter(channel**rest), nn.Parameter(channel ** (0.5 * rest))
        self.mix_v = nn.Parameter(channel**rest + 0.3 * depth)
        self.key, self.value, self.receptance, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        k, v, r = (
            proj(x * mix + before * (1 - mix))
            for proj, mix in ((self.key, self.mix_k), (self.value, self.mix_v), (self.receptance, self.mix_r))
        )
        w = -self.decay.exp()
        # sums of weighted values and of weights, both over exp(most)
        total, weight, most = torch.zeros_like(v[:, 0]), torch.zeros_like(v[:, 0]), torch.full_like(v[:, 0], -1e38)
        outputs = []
        for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
            top = torch.maximum(most, self.first + k_t)
            old, new = (most - top).exp(), (self.first + k_t - top).exp()
            outputs.append((old * total + new * v_t) / (old * weight + new))
            top = torch.maximum(most + w, k_t)
            old, new = (most + w - top).exp(), (k_t - top).exp()
            total, weight, most = old * total + new * v_t, old * weight + new, top
        return self.output(torch.sigmoid(r) * torch.stack(outputs, 1))


MIXERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    'Based': based, 'Hyena': Hyena, 'BaseConv': BaseConv, 'RWKV-4': RWKV4,
}


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, width: int) -> None:
        super().__init__()
        self.mixer, self.norm1, self.norm2 = mixer, nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = h + self.mixer(self.norm1(h))
        return h + self.norm2(h)


class Backbone(nn.Module):
    def __init__(self, mixers: list[nn.Module], width: int, vocab_size: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(mixer, width) for mixer in mixers)
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor]:
        h = self.embeddings(input_ids)
        for block in self.blocks:
            h = block(h)
        return (self.norm(h),)


class Baseline(nn.Module):
    """A language model for the training of `zoology.py`.

    Args:
        mixer (str): One of `MIXERS`.
        hidden_size, num_hidden_layers, vocab_size (int): Size of the model.
        seq_len (int): The longest sequence, for implicit filters.
    """

    def __init__(self, mixer: str, hidden_size: int, num_hidden_layers: int, vocab_size: int, seq_len: int) -> None:
        super().__init__()
        mixers = [MIXERS[mixer](hidden_size, seq_len, layer) for layer in range(num_hidden_layers)]
        self.base_model = Backbone(mixers, hidden_size, vocab_size)
        for name, module in self.base_model.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith('out_proj')
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * num_hidden_layers) if last else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.base_model.embeddings.weight, std=0.02)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.head.weight = self.base_model.embeddings.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids `[B, T]` to logits `[B, T, vocabulary]`; ignores labels, the loss at the queries is computed elsewhere."""
        return self.head(self.base_model(input_ids)[0])

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def num_parameters(self, exclude_embeddings: bool = False) -> int:
        table = self.head.weight.numel()
        return sum(x.numel() for x in self.parameters()) - (table if exclude_embeddings else 0)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.base_model.embeddings

    def get_output_embeddings(self) -> nn.Linear:
        return self.head
