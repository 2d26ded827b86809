"""A language model with its cache as tensors, for exporters: a trace cannot return fla's cache."""

from __future__ import annotations

import torch
import torch.nn as nn

from fla_longhorn.hosts import RewindableCache
from fla_longhorn.models.longhorn import LonghornForCausalLM


class WithStates(nn.Module):
    """A Longhorn language model whose states are arguments and results: prefill, and decoding with one token per row.

    Args:
        model (LonghornForCausalLM):
            The model, whose parameters are shared. Its layers are all Longhorn's.

    Raises:
        TypeError: `model` is of another class.
        ValueError: it has attention layers.

    Examples::
        >>> program = WithStates(model.eval())
        >>> with torch.no_grad():
        ...     logits, *states = program(prompt, *program.new_states(len(prompt)))
        ...     logits, *states = program(logits.argmax(-1, keepdim=True), *states)
    """

    def __init__(self, model: LonghornForCausalLM) -> None:
        if not isinstance(model, LonghornForCausalLM):
            raise TypeError(f'model must be a LonghornForCausalLM, got {type(model).__name__}')
        if model.config.attn is not None:
            raise ValueError(
                f'attn must be None: attention layers keep keys and values, which grow with the text, got {model.config.attn}'
            )
        super().__init__()
        self.model, self.training = model, model.training

    def forward(
        self, input_ids: torch.Tensor, recurrent_states: torch.Tensor, conv_states: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Read tokens that continue `states`, which stay as they are.

        With L layers, B rows, H heads, K entries and V channels per head, D channels, W inputs of the convolution:

        Args:
            input_ids (torch.Tensor):
                Tokens `[B, T]`, without padding, T >= 1.
            recurrent_states (torch.Tensor):
                float32 `[L, B, H, K, V]`; zeros before the first token.
            conv_states (torch.Tensor):
                `[L, B, D, W]` in the dtype of the model; zeros before the first token.

        Returns:
            Logits `[B, vocab_size]` after the last token, and the states there.
        """
        cache = RewindableCache()
        for i in range(self.model.config.num_hidden_layers):
            # a step may write to the states, so it gets copies
            cache.update(layer_idx=i, recurrent_state=recurrent_states[i].clone(), conv_state=conv_states[i].clone())
        logits = self.model(input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        layers = [cache[i] for i in range(len(cache))]
        return logits, *(torch.stack([layer[name] for layer in layers]) for name in ('recurrent_state', 'conv_state'))

    def new_states(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The states before the first token."""
        config, weight = self.model.config, self.model.model.embeddings.weight
        L, H, D = config.num_hidden_layers, config.num_heads, round(config.hidden_size * config.expand)
        return (
            weight.new_zeros(L, batch_size, H, config.state_size, D // H, dtype=torch.float32),
            weight.new_zeros(L, batch_size, D, config.conv_size),
        )
