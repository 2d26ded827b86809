"""fla's Mamba and Mamba-2 by the kernels that they have on a GPU, which mamba_ssm brings.

Its sources are enough, without an installation: `PYTHONPATH=CHECKOUT` of github.com/state-spaces/mamba. What it has in Triton
is compiled. What is CUDA is replaced: the convolution of causal_conv1d by fla's in Triton, which fla's layers take in its
absence, and Mamba's selective scan by the least time that its bytes and its source's instructions take.
"""

from __future__ import annotations

from importlib.util import find_spec
from unittest import mock

import torch
from fla import layers
from fla.modules.causal_conv1d import causal_conv1d_bwd, causal_conv1d_fwd
from torch import Tensor

from benchmarks.predict.floors import scan_instructions
from offgpu.launches import Launch, add_launch

# tokens between the states that the scan saves
INTERVAL = 2048


class Mamba(layers.Mamba):
    # for tensors that are not on a GPU, fla would take its loops in PyTorch
    slow_forward = layers.Mamba.cuda_kernels_forward


class Mamba2(layers.Mamba2):
    torch_forward = layers.Mamba2.cuda_kernels_forward


def channels_last(x: Tensor) -> Tensor:
    """`[B, D, T]` as fla's convolution takes it. Where D is strided, memory in that layout: causal_conv1d copies nothing."""
    x = x.transpose(1, 2)
    return x if x.stride(2) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def convolution_fwd(x, weight, bias, seq_idx, initial_states, final_states, silu: bool) -> Tensor:
    """`causal_conv1d_fwd_function` of causal_conv1d."""
    y, _ = causal_conv1d_fwd(channels_last(x), weight, bias, None, activation='silu' if silu else None)
    return y.transpose(1, 2) if x.stride(1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def convolution_bwd(
    x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, return_dinitial_states: bool, silu: bool,
) -> tuple[Tensor, ...]:
    """`causal_conv1d_bwd_function` of causal_conv1d, which writes to `dx`."""
    about = dict(weight=weight, bias=bias, activation='silu' if silu else None)
    _, dw, db, *_ = causal_conv1d_bwd(channels_last(x), channels_last(dout), None, **about)
    return dx, dw, db, None


class Scan:
    """`selective_scan_cuda`: allocates what its two functions return, and adds a launch for each."""

    @staticmethod
    def launch(direction: str, u: Tensor, A: Tensor, tensors: list[Tensor | None]) -> None:
        add_launch(Launch(
            f'selective_scan_{direction}_kernel', nbytes=sum(x.numel() * x.itemsize for x in tensors if x is not None),
            issued=u.numel() * scan_instructions(direction, A.shape[1]) / 32,
        ))

    @classmethod
    def fwd(cls, u, delta, A, B, C, D, z, delta_bias, softplus: bool) -> list[Tensor]:
        states = A.new_empty(*u.shape[:2], -(-u.shape[2] // INTERVAL), 2 * A.shape[1])
        results = [torch.empty_like(delta), states, *([] if z is None else [torch.empty_like(z)])]
        cls.launch('fwd', u, A, [u, delta, A, B, C, D, z, delta_bias, *results])
        return results

    @classmethod
    def bwd(
        cls, u, delta, A, B, C, D, z, delta_bias, dout, states, out, dz, softplus: bool, recompute_out_z: bool,
    ) -> list[Tensor]:
        du, ddelta = torch.empty_like(u), torch.empty_like(delta)
        dA, dD, ddelta_bias = (torch.zeros_like(x) for x in (A, D, delta_bias))
        # sums over the channels
        dB, dC = (torch.zeros_like(x, dtype=torch.float32) for x in (B, C))
        gate = [] if z is None else [torch.empty_like(z) if dz is None else dz]
        gate += [torch.empty_like(out)] if recompute_out_z else []
        given = [u, delta, A, B, C, D, z, delta_bias, dout, states, out]
        cls.launch('bwd', u, A, [*given, du, ddelta, dA, dB, dC, dD, ddelta_bias, *gate])
        return [du, ddelta, dA, dB.to(B.dtype), dC.to(C.dtype), dD, ddelta_bias, *gate]


def version() -> str | None:
    """That of the mamba_ssm that is there."""
    if find_spec('mamba_ssm') is None:
        return None
    import mamba_ssm
    return mamba_ssm.__version__


def replaced() -> list:
    """The patches of mamba_ssm; none where it is not there."""
    if version() is None:
        return []
    from mamba_ssm.ops import selective_scan_interface
    from mamba_ssm.ops.triton import ssd_combined
    return [
        mock.patch.object(selective_scan_interface, 'selective_scan_cuda', Scan),
        *(mock.patch.object(module, f'causal_conv1d_{direction}_function', function)
          for module in (selective_scan_interface, ssd_combined)
          for direction, function in (('fwd', convolution_fwd), ('bwd', convolution_bwd))),
    ]
