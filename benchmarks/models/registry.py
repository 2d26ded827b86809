"""The models that `python -m benchmarks model` compares, and their sizes.

A size gives every model the same width, vocabulary and tied embeddings, and a depth for about equally many parameters: for
width d, a layer of Longhorn or Mamba has about 6 d^2, a block of attention (4 d^2) and MLP (8 d^2) as many as two such layers.
So models without MLPs have twice as many layers. GPT-2's MLP has two matrices of 4 d^2, Llama's three, whose width is rounded
up to 256 as in fla. GPT-2 also has learned positions for its longest prompt. The rows of a report give the number of
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import torch
import transformers
from fla.models import DeltaNetConfig, GLAConfig, Mamba2Config, MambaConfig, TransformerConfig
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import fla_longhorn  # noqa: F401  registers
from fla_longhorn.models import LonghornConfig
from fla_longhorn_cpu.attention import use_pytorch_attention

# warm-up tokens of a stream
WARM = 3


@dataclass(frozen=True)
class Size:
    """`blocks` are mixer and MLP; `batch_size` and `seq_len` are for training steps, the rest for generation."""

    hidden_size: int
    blocks: int
    head_dim: int
    vocab_size: int
    batch_size: int
    seq_len: int
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    new_tokens: int

    @property
    def heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.seq_len, max(self.prompts) + WARM + self.new_tokens)


@dataclass(frozen=True)
class Row:
    """A model as data; `cannot` gives the reason why it is not run, by device type."""

    name: str
    config: Callable[[Size], PreTrainedConfig]
    cannot: dict[str, str] = field(default_factory=dict)
    build: Callable[[PreTrainedConfig], PreTrainedModel] = AutoModelForCausalLM.from_config


SIZES = {
    'small': Size(128, 2, 32, 1000, 2, 256, (1, 8), (64, 512, 2048, 8192), 32),
    '120m': Size(768, 12, 64, 50304, 8, 2048, (1, 8), (64, 512, 2048, 8192), 32),
}


def common(size: Size) -> dict:
    return {
        'hidden_size': size.hidden_size, 'vocab_size': size.vocab_size, 'tie_word_embeddings': True,
        'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': 0,
    }


def with_mlp(config: type, size: Size, **options) -> PreTrainedConfig:
    return config(**common(size), num_hidden_layers=size.blocks, **options)


def without_mlp(config: type, size: Size, **options) -> PreTrainedConfig:
    return config(**common(size), num_hidden_layers=2 * size.blocks, **options)


def wide_heads(size: Size) -> int:
    """Heads of 128 channels, as GLA and DeltaNet have."""
    return max(size.hidden_size // 128, 1)


def mamba2(config: type, size: Size) -> PreTrainedConfig:
    return without_mlp(config, size, head_dim=size.head_dim, num_heads=2 * size.heads, n_groups=1)


def without_flash_attn(config: PreTrainedConfig) -> PreTrainedModel:
    """fla's Transformer, which needs the package `flash_attn`."""
    use_pytorch_attention()
    return AutoModelForCausalLM.from_config(config)


def gpt2(size: Size) -> PreTrainedConfig:
    return with_mlp(
        transformers.GPT2Config, size, num_attention_heads=size.heads, n_positions=size.positions,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )


def llama(size: Size) -> PreTrainedConfig:
    width = 256 * -(-8 * size.hidden_size // (3 * 256))
    return with_mlp(
        transformers.LlamaConfig, size, num_attention_heads=size.heads, intermediate_size=width,
        max_position_embeddings=size.positions,
    )


TRITON = {'cpu': "its mixer's kernels are Triton's and need a GPU"}
SCAN = {} if find_spec('mamba_ssm') else {'cuda': 'mamba_ssm is not installed; without it a loop over tokens stands in'}
REFERENCE = {'cuda': 'a loop over tokens, for machines without a GPU'}

MODELS = (
    Row('Longhorn', partial(without_mlp, LonghornConfig)),
    Row('Longhorn, exact', lambda size: without_mlp(LonghornConfig, size, exact=True)),
    Row('Longhorn, gate per channel', lambda size: without_mlp(LonghornConfig, size, gate='channel')),
    Row('Longhorn, exact, gate per channel', lambda size: without_mlp(LonghornConfig, size, exact=True, gate='channel')),
    Row('Longhorn, exact, gate per head', lambda size: without_mlp(LonghornConfig, size, exact=True, gate='head')),
    Row('GPT-2', gpt2, build=transformers.GPT2LMHeadModel),
    Row('Llama', llama, build=transformers.LlamaForCausalLM),
    Row("transformers' Mamba", partial(without_mlp, transformers.MambaConfig), REFERENCE, transformers.MambaForCausalLM),
    Row("transformers' Mamba2", partial(mamba2, transformers.Mamba2Config), REFERENCE, transformers.Mamba2ForCausalLM),
    Row('GLA', lambda size: with_mlp(GLAConfig, size, num_heads=wide_heads(size)), cannot=TRITON),
    Row('GLA, attn_mode=longhorn', lambda size: with_mlp(GLAConfig, size, attn_mode='longhorn')),
    Row('DeltaNet', lambda size: with_mlp(DeltaNetConfig, size, num_heads=wide_heads(size)), cannot=TRITON),
    Row('DeltaNet, attn_mode=longhorn', lambda size: with_mlp(DeltaNetConfig, size, attn_mode='longhorn')),
    Row('Mamba', partial(without_mlp, MambaConfig), cannot=SCAN),
    Row('Mamba2', partial(mamba2, Mamba2Config), cannot=TRITON),
    Row('Transformer', lambda size: with_mlp(TransformerConfig, size, num_heads=size.heads), build=without_flash_attn),
)


def random_tokens(size: Size, batch_size: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.randint(1, size.vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(0)).to(device)
