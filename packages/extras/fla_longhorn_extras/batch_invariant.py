"""Training equals serving, to the bit: a model whose logits do not depend on how tokens are batched or cut.

Reinforcement learning compares the probabilities of a token in generation and in training. On a CPU, Longhorn's recurrence,
its convolution and the norms give a token the same bits in both; a matrix product does not, because libraries sum in another
order where there are other rows beside it. On a GPU nothing does: kernels and their launches change with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.layers.attn import Attention
from fla.layers.rodimus import SlidingWindowSharedKeyAttention

from fla_longhorn.layers import Longhorn
from fla_longhorn.layers.gate import Gate
from fla_longhorn.modules import L2Norm, RMSNorm, ShortConvolution
from fla_longhorn.ops import fused_recurrent_longhorn
from fla_longhorn.ops.backends import select_backend

Model = TypeVar('Model', bound=nn.Module)
# every product and every norm has so many rows, whatever the batch: on a GPU few launches count more than rows without use
BLOCK, BLOCK_ON_DEVICE = 32, 256
# of the layer's channels, which the loops on a CPU take together
CHANNELS = 16
# of keys on a GPU
MAX_STATE_SIZE = 128


class InBlocks(nn.Module):
    """A function of rows in calls of equal size, the last of which is filled up with zeros."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows, function = x.reshape(-1, x.shape[-1]), super().forward
        size = BLOCK if x.is_cpu else BLOCK_ON_DEVICE
        done = [function(block, *args, **kwargs) for block in F.pad(rows, (0, 0, 0, -len(rows) % size)).split(size)]
        y = done[0] if len(done) == 1 else torch.cat(done)
        return y[:len(rows)].view(*x.shape[:-1], -1)


class BlockLinear(InBlocks, nn.Linear):  # type: ignore[misc]  # names of arguments
    pass


class BlockRMSNorm(InBlocks, RMSNorm):
    pass


class BlockTorchRMSNorm(InBlocks, nn.RMSNorm):
    pass


class BlockL2Norm(InBlocks, L2Norm):
    pass


class InvariantConvolution(ShortConvolution):
    """In PyTorch, but for the compiled loops of four taps, which give a token the same bits alone and in a sequence."""

    def is_launched(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> bool:
        return x.is_cpu and self.kernel_size[0] == 4 and super().is_launched(x, cu_seqlens)


def recurrence_in_one_kernel(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fused_recurrent_longhorn` by the kernel for sequences, which saves states: for a single token there is another one."""
    needs_gradient = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs.values())
    states = inputs['q'].shape[1] == 1 and not needs_gradient
    o, final_state, *_ = fused_recurrent_longhorn(**inputs, return_intermediate_states=states)
    return o, final_state


class Invariant:
    """A Longhorn layer with one recurrence for all lengths."""

    def op_for(self, T: int) -> Callable:
        return recurrence_in_one_kernel


BLOCKWISE: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: BlockLinear, RMSNorm: BlockRMSNorm, nn.RMSNorm: BlockTorchRMSNorm, L2Norm: BlockL2Norm,
    ShortConvolution: InvariantConvolution,
}
# what has parameters and gives a token the same bits on a GPU
INVARIANT = (*BLOCKWISE.values(), nn.Embedding, Longhorn, Gate)


def make_batch_invariant(model: Model) -> Model:
    """Change a Longhorn model so that a token's logits have the same bits however it is computed.

    In a call on whole sequences, in training too, after a prompt, token by token, beside other rows, and with padding on the
    left. Products and norms have a fixed number of rows, filled up with zeros; on a GPU the recurrence runs token by token, in
    one kernel for all lengths, and the convolution in PyTorch. On the CPU it needs Numba and a multiple of 16 channels. There
    is no such promise for gradients, for a prompt read in several pieces of more than one token, for two devices or processes,
    and under `torch.compile`. Parameters, checkpoints and adapters stay as they are: apply it after adapters are added, where
    the model runs.

    Args:
        model (nn.Module):
            A model with Longhorn layers, in float32 or bfloat16. It is changed in place.

    Returns:
        The model.

    Raises:
        ValueError: the model has attention layers, whose sums depend on the keys beside them, weights of another class than
            `nn.Parameter` or another dtype, subclasses of linear layers or norms, channels that are no multiple of 16, runs in
            PyTorch, or on a GPU has a `state_size` above 128 or a module with parameters that is not one of Longhorn's models.

    Examples::
        >>> model = make_batch_invariant(LonghornForCausalLM(LonghornConfig(hidden_size=64, num_hidden_layers=2)))
    """
    for name, module in model.named_modules():
        if isinstance(module, (Attention, SlidingWindowSharedKeyAttention)):
            raise ValueError(f'model must have no attention layers, got one in {name}')
        if isinstance(module, Longhorn) and module.state_size > MAX_STATE_SIZE and not module.D.is_cpu:
            raise ValueError(
                f'state_size must be at most {MAX_STATE_SIZE} on {module.D.device}, got {module.state_size} in {name}: larger '
                'keys are shared by threads, in whose sums Triton has a choice'
            )
        if isinstance(module, Longhorn) and module.intermediate_size % CHANNELS:
            raise ValueError(
                f'expand * hidden_size must be a multiple of {CHANNELS}, got {module.intermediate_size} in {name}: the loops '
                'take other channels one by one'
            )
        if isinstance(module, tuple(BLOCKWISE)) and type(module) not in (*BLOCKWISE, *BLOCKWISE.values()):
            kind = type(module).__name__
            raise ValueError(f'model must have linear layers and norms of a known class, got {kind} in {name}')
        for x in module.parameters(recurse=False):
            if x.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f'model must be in float32 or bfloat16, got {x.dtype} in {name}')
            if select_backend(x.device).__name__.endswith('.torch'):
                raise ValueError('make_batch_invariant needs the compiled loops of fla-longhorn-cpu on a CPU, got PyTorch')
            if type(x) is not nn.Parameter:
                raise ValueError(f'model must have plain weights, got {type(x).__name__} in {name}')
            if not (x.is_cpu or type(module) in BLOCKWISE or isinstance(module, INVARIANT)):
                kind = type(module).__name__
                raise ValueError(f"model must have Longhorn's own modules on {x.device}, got {kind} in {name}")
    for module in model.modules():
        module.__class__ = BLOCKWISE.get(type(module), module.__class__)
        if isinstance(module, Longhorn):
            module.__class__ = type(type(module).__name__, (Invariant, type(module)), {})
    return model
