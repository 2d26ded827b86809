"""The token mixer for images, Longhorn over the patches in both directions in one call of the operator; and its block."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import DropPath

from fla_longhorn.layers.gate import Gate
from fla_longhorn.layers.options import check_options, rank_of
from fla_longhorn.layers.weight_decay import NoWeightDecay
from fla_longhorn.modules import ShortConvolution
from fla_longhorn.ops import chunk_longhorn
from fla_longhorn_extras.timm.packing import Packing, reverse
from fla_longhorn_extras.timm.tracing import RMSNorm, in_one_call


class DirectionalLinear(nn.Module):
    """One linear map per direction: `[B, T, G, in_features]` to `[B, T, G, out_features]`."""

    def __init__(self, directions: int, in_features: int, out_features: int, bias: bool, device=None, dtype=None) -> None:
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.weight = nn.Parameter(torch.empty(directions, out_features, in_features, **dd))
        self.bias = nn.Parameter(torch.empty(directions, out_features, **dd)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Linear`, but with a bias of zero."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum('btgi,goi->btgo', x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        directions, out_features, in_features = self.weight.shape
        return f'{directions}, {in_features}, {out_features}, bias={self.bias is not None}'


class BidirectionalLonghorn(NoWeightDecay):
    r"""Longhorn (arXiv 2407.14207, Eq. 7) in two directions, as Vision Mamba (arXiv 2401.09417) runs Mamba.

    .. math::
        x, z = W_{in} h, \quad
        y = \tfrac{1}{2} \big( L_\rightarrow(x) + \mathrm{flip}(L_\leftarrow(\mathrm{flip}(x))) \big), \quad
        o = W_{out} (y \odot \mathrm{silu}(z))

    where each :math:`L` has its own convolution, projections to step sizes, keys and queries, skip weight `D` and, with
    `gate`, decays. The directions are two heads of one call of the operator: head 0 reads the tokens, head 1 reads them in
    reverse.

    Args:
        hidden_size (int):
            Width of the input and output.
        state_size, expand, conv_size, beta_rank, exact, scalar_beta, allow_neg_eigval, gate (Optional):
            Those of :class:`fla_longhorn.layers.Longhorn`, for each direction, which is one head.
        bidirectional (bool, Optional):
            Whether there is the second direction. Default: `True`.
    """

    no_weight_decay = ('D',)

    def __init__(
        self,
        hidden_size: int,
        state_size: int = 16,
        expand: float = 2,
        conv_size: int = 4,
        beta_rank: int | str = 'auto',
        exact: bool = False,
        scalar_beta: bool = False,
        bidirectional: bool = True,
        allow_neg_eigval: bool = False,
        gate: str | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_options(
            mode='chunk', hidden_size=hidden_size, state_size=state_size, expand=expand, num_heads=1, conv_size=conv_size,
            beta_rank=beta_rank, exact=exact, scalar_beta=scalar_beta, k_norm=None, norm_eps=1e-5,
            allow_neg_eigval=allow_neg_eigval, gate=gate,
        )
        dd = {'device': device, 'dtype': dtype}
        G, V = 2 if bidirectional else 1, round(hidden_size * expand)
        self.directions = G
        self.state_size = state_size
        self.exact = exact
        self.scalar_beta = scalar_beta
        self.allow_neg_eigval = allow_neg_eigval
        self.beta_rank = rank_of(beta_rank, hidden_size)

        self.in_proj = nn.Linear(hidden_size, 2 * V, bias=False, **dd)
        self.conv1d = ShortConvolution(G * V, conv_size, bias=True, activation='silu', **dd)
        self.x_proj = DirectionalLinear(G, V, self.beta_rank + 2 * state_size, bias=False, **dd)
        self.beta_proj = DirectionalLinear(G, self.beta_rank, 1 if scalar_beta else V, bias=True, **dd)
        self.gate = nn.ModuleList(
            Gate(V, self.beta_rank, 1, V if gate == 'channel' else None, **dd) for _ in range(G)
        ) if gate else None
        self.D = nn.Parameter(torch.ones(G * V, **dd))
        self.out_proj = nn.Linear(V, hidden_size, bias=False, **dd)

    def reset_parameters(self) -> None:
        # submodules have a method of their own for their parameters
        nn.init.ones_(self.D)

    @in_one_call
    def forward(self, hidden_states: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
        """Mix tokens `[B, T, hidden_size]`, one image per row, or images packed into one row (B = 1) as `packing` says."""
        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)
        if self.directions == 2:
            x = torch.cat([x, reverse(x, packing)], -1)
        cu_seqlens = None if packing is None else packing.cu_seqlens
        x, _ = self.conv1d(x, cu_seqlens=cu_seqlens)
        # [B, T, G, V]
        v = x.unflatten(-1, (self.directions, -1))
        beta, k, q = self.x_proj(v).split([self.beta_rank, self.state_size, self.state_size], dim=-1)
        beta = self.beta_proj(beta)
        # the values of the second direction are in reverse, and so are the decays that they give
        g = None if self.gate is None else torch.cat([gate(x) for gate, x in zip(self.gate, v.unbind(2), strict=True)], 2)
        o, _ = chunk_longhorn(
            q, k, v, beta.squeeze(-1) if self.scalar_beta else beta, D=self.D.unflatten(0, (self.directions, -1)),
            exact=self.exact, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=self.allow_neg_eigval, cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=None if packing is None else packing.cu_seqlens_cpu, g=g,
        )
        # the directions share z, so the mean is gated once
        y = o[:, :, 0]
        if self.directions == 2:
            y = (y + reverse(o[:, :, 1], packing)) / 2
        return self.out_proj(y * F.silu(z))


class Block(nn.Module):
    """`x + mixer(norm(x))` with `x` in float32; there is no MLP, as in Vision Mamba."""

    def __init__(self, dim: int, drop_path: float = 0., device=None, dtype=None, **mixer: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, eps=1e-5, device=device, dtype=dtype)
        self.mixer = BidirectionalLonghorn(dim, device=device, dtype=dtype, **mixer)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
        y = self.mixer(self.norm(x).to(self.mixer.in_proj.weight.dtype), packing)
        if packing is None:
            return x + self.drop_path(y)
        # drop images, not the row that holds all of them
        kept = self.drop_path(y.new_ones(packing.lengths.shape[0], 1))
        # without output_size, PyTorch reads the sum of the lengths on the host
        return x + y * kept.repeat_interleave(packing.lengths, 0, output_size=y.shape[1])
