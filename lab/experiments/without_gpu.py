"""Operators of `chunkwise.py` and `selective_scan.py` in the place of kernels that need a GPU."""

from __future__ import annotations

import logging

import torch
from fla.layers import delta_net, gated_deltanet, gla, kda, mamba2
from fla.modules.norm import layernorm_gated
from torch import Tensor
from transformers.models.mamba import modeling_mamba

from lab.experiments import chunkwise
from lab.experiments.selective_scan import mamba_selective_scan

mamba2_loop = mamba2.Mamba2.torch_forward


def mamba2_forward(layer: mamba2.Mamba2, x: Tensor, last_state: dict | None, use_cache: bool, mask: Tensor | None) -> tuple:
    """A sequence by the chunked operator; tokens after it by fla's loop."""
    if last_state is not None:
        return mamba2_loop(layer, x, last_state, use_cache, mask)
    # without `use_cache`, training takes a kernel with the convolution and the projection in it
    return layer.cuda_kernels_forward(x, None, True, mask)


# a module or class of fla's or transformers', the names of operators in it, and what serves for them
STAND_INS = (
    (gla, ('chunk_gla', 'fused_recurrent_gla'), chunkwise.chunk_gla),
    (delta_net, ('chunk_delta_rule', 'fused_recurrent_delta_rule'), chunkwise.chunk_delta_rule),
    (gated_deltanet, ('chunk_gated_delta_rule', 'fused_recurrent_gated_delta_rule'), chunkwise.chunk_gated_delta_rule),
    (kda, ('chunk_kda', 'fused_recurrent_kda'), chunkwise.chunk_gated_delta_rule),
    (modeling_mamba, ('mamba_selective_scan',), mamba_selective_scan),
    (mamba2, ('mamba_chunk_scan_combined',), chunkwise.mamba_chunk_scan_combined),
    (mamba2.Mamba2, ('torch_forward',), mamba2_forward),
)


def install() -> None:
    """Without a GPU, put them in the place of kernels in this process, and of Mamba's and Mamba-2's loops."""
    if torch.cuda.is_available():
        return
    # it names packages with kernels to install
    mamba2.logger.setLevel(logging.ERROR)
    layernorm_gated.rmsnorm_fn = layernorm_gated.rms_norm_ref
    for module, names, function in STAND_INS:
        for name in names:
            setattr(module, name, function)
