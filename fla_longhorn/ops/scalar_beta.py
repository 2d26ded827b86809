"""One step size a head, through fla's kernels: the diagonal update is then GLA, the exact one the delta rule.

.. math::
    \\mathrm{diagonal:}\\; g_k = \\log(1 - \\epsilon k^2),\\; v' = \\epsilon v \\;\\text{in GLA}, \\qquad
    \\mathrm{exact:}\\; \\beta' = \\epsilon \\;\\text{in DeltaNet}, \\qquad \\epsilon = \\beta / (1 + \\beta |k|^2)

`FLA_LONGHORN_SCALAR_BETA=fla` sends the calls that fla's kernels can serve (a GPU, one 16-bit dtype) this way; without it
our own kernels serve them all.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor


def applies(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> bool:
    """Whether fla's kernels are asked for and take these arguments."""
    if os.environ.get('FLA_LONGHORN_SCALAR_BETA') != 'fla' or beta.dim() != 3 or torch.compiler.is_compiling():
        return False
    return q.device.type == 'cuda' and q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)


def chunk_scalar_beta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    exact: bool,
    D: Tensor | None,
    z: Tensor | None,
    use_beta_sigmoid: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """`o` and the final state, as :func:`fla_longhorn.ops.chunk_longhorn` returns them."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gla import chunk_gla

    eps, log_decay = steps(k, beta, use_beta_sigmoid)
    if initial_state is not None and state_v_first:
        initial_state = initial_state.mT
    options = dict(
        scale=1.0 if scale is None else float(scale), output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        initial_state=None if initial_state is None else initial_state.float().contiguous(),
    )
    if exact:
        o, final_state = chunk_delta_rule(q, k, v, eps, **options)
    else:
        o, final_state = chunk_gla(q, k, (eps[..., None] * v).to(v.dtype), log_decay, **options)
    if D is not None or z is not None:
        o = o.float()
        o = o if D is None else o + D.float() * v.float()
        o = (o if z is None else o * F.silu(z.float())).to(v.dtype)
    if final_state is not None and state_v_first:
        final_state = final_state.mT
    return o, final_state


def steps(k: Tensor, beta: Tensor, use_beta_sigmoid: bool) -> tuple[Tensor, Tensor]:
    """`eps [B, T, H]` and `log(1 - eps k^2) [B, T, H, K]`, float32 or float64.

    `1 - eps k_j^2 = (1 + beta (|k|^2 - k_j^2)) / (1 + beta |k|^2)` doesn't cancel where `eps k_j^2` is near 1.
    """
    k, beta = (x if x.dtype == torch.float64 else x.float() for x in (k, beta))
    beta = beta.sigmoid() if use_beta_sigmoid else beta
    squares = k.square()
    # the sum of the other entries' squares, without taking one off their total
    others = squares @ (1 - torch.eye(k.shape[-1], dtype=k.dtype, device=k.device))
    norm = 1 + beta * squares.sum(-1)
    return beta / norm, torch.log1p(beta[..., None] * others) - torch.log(norm)[..., None]
