"""Training equals serving, to the bit: a model on a CPU whose logits do not depend on how tokens are batched or cut.

Reinforcement learning compares the probabilities of a token in generation and in training. Longhorn's recurrence, its
convolution and the norms give a token the same bits in both; a matrix product does not, because libraries sum in another
order where there are other rows beside it.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.layers.attn import Attention

Model = TypeVar('Model', bound=nn.Module)
# every product has so many rows, whatever the batch
BLOCK = 32


class BlockLinear(nn.Linear):
    """`nn.Linear` as products of `BLOCK` rows, the last of which are filled up with zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        blocks = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK)).split(BLOCK)
        y = torch.cat([F.linear(block, self.weight, self.bias) for block in blocks])
        return y[:len(rows)].view(*x.shape[:-1], -1)


def make_batch_invariant(model: Model) -> Model:
    """Change the linear layers of a Longhorn model so that a token's logits have the same bits however it is computed.

    In a call on whole sequences, in training too, after a prompt, token by token, beside other rows, and with padding on the
    left. It needs Numba, convolutions of four taps, and a multiple of 16 channels. There is no such promise for gradients, for
    a prompt read in several pieces of more than one token, and under `torch.compile`. Parameters, checkpoints and adapters
    stay as they are: apply it after adapters are added.

    Args:
        model (nn.Module):
            A model with Longhorn layers, in float32 or bfloat16 on the CPU. It is changed in place.

    Returns:
        The model.

    Raises:
        ValueError: the model has attention layers, whose sums depend on the keys beside them, or is not on the CPU, or has
            weights of another class than `nn.Parameter`. On a GPU, chunks of tokens are multiplied on tensor cores.

    Examples::
        >>> model = make_batch_invariant(LonghornForCausalLM(LonghornConfig(hidden_size=64, num_hidden_layers=2)))
    """
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            raise ValueError(f'model must have no attention layers, got one in {name}')
    for name, x in model.named_parameters():
        if x.device.type != 'cpu':
            raise ValueError(f'model must be on the CPU, got {name} on {x.device}')
        if type(x) is not nn.Parameter:
            raise ValueError(f'model must have plain weights, got {type(x).__name__} in {name}')
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = BlockLinear
    return model
