"""fla's fused modules in plain PyTorch, for swapped families on a CPU: fla has kernels alone, and a package its own loops.

A test's model of a family of fla so needs no package. Where there is one, nothing is replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# it has fla's modules on the CPU
HAS_PACKAGE = find_spec('fla_cpu') is not None


def rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, is_rms_norm=True):
    rows, stream = x.float(), x.float() if residual_in_fp32 else x
    if residual is not None:
        rows = rows + residual
        stream = rows.to(residual.dtype)
    y = rows if is_rms_norm else rows - rows.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    y = (y if bias is None else y + bias).to(x.dtype)
    return (y, stream) if prenorm else y


def layer_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, is_rms_norm=False):
    return rms_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return (F.silu(x.float()) * y.float()).to(x.dtype)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(swiglu(x, y).to(weight.dtype), weight, bias)


def cross_entropy(self, input: Tensor, target: Tensor) -> Tensor:
    """`FusedCrossEntropyLoss.forward`, with what the models set of its options."""
    if getattr(self, 'inplace_backward', False):
        input.register_hook(input.detach().copy_)
    return F.cross_entropy(input.float(), target, ignore_index=self.ignore_index, reduction=self.reduction)


def linear_cross_entropy(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`FusedLinearCrossEntropyLoss.forward`, in the same way."""
    from fla.modules.l2warp import l2_warp

    logits = F.linear(x, weight, bias)
    loss = cross_entropy(self, logits.flatten(0, -2), target.flatten())
    return l2_warp(loss, logits, self.l2_penalty_factor) if self.use_l2warp else loss


def rotary_embedding(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, chunk_indices=None):
    """Of halves, `x` `[B, T, H, D]`; a token before position 0 becomes zero."""
    assert not interleaved and not inplace
    position = torch.arange(x.shape[1])[None]
    if cu_seqlens is not None:
        position = position - (cu_seqlens[:-1] - seqlen_offsets).repeat_interleave(cu_seqlens.diff())
    else:
        position = position + (seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets)
    own_cos, own_sin = (table.float()[position.clamp_min(0)][:, :, None] for table in (cos, sin))
    width = 2 * cos.shape[1]
    first, second = x[..., :width].float().chunk(2, -1)
    rotated = torch.cat([first * own_cos - second * own_sin, first * own_sin + second * own_cos], -1)
    rotated = rotated * (position >= 0)[:, :, None, None]
    return torch.cat([rotated.to(x.dtype), x[..., width:]], -1)


def token_shift(x, cu_seqlens=None, cache=None, output_cache=False, chunk_indices=None):
    """`y_t = x_{t-1} - x_t`, with `cache` `[N, D]` or zeros before a sequence; the last rows are the next cache."""
    rows = x.flatten(0, 1)
    bounds = torch.arange(len(x) + 1) * x.shape[1] if cu_seqlens is None else cu_seqlens.long()
    previous = rows.roll(1, 0)
    before = torch.zeros_like(rows[bounds[:-1]]) if cache is None else cache.reshape(-1, x.shape[-1]).to(x.dtype)
    y = (previous.index_put((bounds[:-1],), before) - rows).view_as(x)
    return (y, rows[bounds[1:] - 1]) if output_cache else y


def square_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def replace(owner: Any, name: str, plain: Callable) -> None:
    """For tensors on the CPU."""
    fused = getattr(owner, name)

    @wraps(fused)
    def run(*args, **kwargs):
        first = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return (plain if first.is_cpu else fused)(*args, **kwargs)

    setattr(owner, name, run)


def install() -> None:
    """Put them in fla's place, for good, where no package is."""
    if HAS_PACKAGE:
        return
    norms, mlp, rotary, rwkv7, modules = (importlib.import_module(f'fla.{name}') for name in (
        'modules.norm.layernorm', 'modules.mlp', 'modules.rotary.ops', 'models.rwkv7.modeling_rwkv7', 'modules',
    ))
    for owner, functions in (
        (norms, (rms_norm, layer_norm)),
        (mlp, (swiglu, swiglu_linear)),
        (rotary, (rotary_embedding,)),
        (rwkv7, (token_shift,)),
    ):
        for plain in functions:
            replace(owner, plain.__name__, plain)
    replace(modules.FusedCrossEntropyLoss, 'forward', cross_entropy)
    replace(modules.FusedLinearCrossEntropyLoss, 'forward', linear_cross_entropy)
    fused = modules.activations.ACT2FN['sqrelu']
    modules.activations.ACT2FN['sqrelu'] = lambda x: square_relu(x) if x.is_cpu else fused(x)
