"""Options of the command, and its two models."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig

from fla_longhorn import LonghornConfig


@dataclass(frozen=True)
class RunArguments:
    hidden_size: int = field(default=256, metadata={'help': 'Width of both models, a multiple of head_dim.'})
    num_hidden_layers: int = field(default=4, metadata={'help': 'Layers of both models.'})
    state_size: int = field(default=16, metadata={'help': "Longhorn's memory entries per channel."})
    exact: bool = field(default=True, metadata={'help': 'The exact form; False for the diagonal one.'})
    head_dim: int = field(default=64, metadata={'help': "Width of the Transformer's heads."})
    vocab_size: int = field(default=1000, metadata={'help': 'Tokens of both models.'})
    prompt_tokens: int = field(default=4096, metadata={'help': 'Tokens of the system prompt.'})
    question_tokens: int = field(default=16, metadata={'help': 'Tokens of each question after it.'})
    num_questions: int = field(default=8, metadata={'help': 'Questions, each answered from the file.'})
    answer_tokens: int = field(default=16, metadata={'help': 'Tokens of each answer.'})
    seed: int = field(default=0, metadata={'help': 'Seed of the weights and of all tokens.'})
    device: str = field(default='auto', metadata={'help': 'auto (the GPU where there is one), cpu or cuda.'})
    output_dir: str = field(default='outputs/prompt', metadata={'help': 'Where file, checkpoint and figures go.'})

    def __post_init__(self) -> None:
        counts = ('prompt_tokens', 'question_tokens', 'num_questions', 'answer_tokens')
        for name in ('hidden_size', 'num_hidden_layers', 'state_size', 'head_dim', 'vocab_size', *counts):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}')
        if self.hidden_size % self.head_dim:
            raise ValueError(f'hidden_size must be a multiple of head_dim = {self.head_dim}, got {self.hidden_size}')
        if self.device not in ('auto', 'cpu', 'cuda'):
            raise ValueError(f'device must be auto, cpu or cuda, got {self.device!r}')
        if self.device == 'cuda' and not torch.cuda.is_available():
            raise ValueError('device is cuda, but PyTorch sees no GPU; take auto or cpu')

    @property
    def torch_device(self) -> torch.device:
        return torch.device('cpu' if self.device == 'cpu' or not torch.cuda.is_available() else 'cuda')

    def longhorn(self) -> LonghornConfig:
        """Without special tokens: no answer ends early."""
        return LonghornConfig(
            hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers, state_size=self.state_size,
            exact=self.exact, vocab_size=self.vocab_size, bos_token_id=None, eos_token_id=None,
        )

    def llama(self) -> LlamaConfig:
        """A Transformer of this width and depth; each head has keys and values of its own."""
        return LlamaConfig(
            hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers, intermediate_size=3 * self.hidden_size,
            num_attention_heads=self.hidden_size // self.head_dim, vocab_size=self.vocab_size,
            max_position_embeddings=self.prompt_tokens, bos_token_id=None, eos_token_id=None,
        )
