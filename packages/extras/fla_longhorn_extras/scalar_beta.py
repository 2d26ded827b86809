"""One step size per head, by fla's kernels: the diagonal update is then GLA, the exact one the (gated) delta rule.

.. math::
    \\mathrm{diagonal:}\\; g_k = \\log(1 - \\epsilon k^2),\\; v' = \\epsilon v \\;\\text{in GLA}, \\qquad
    \\mathrm{exact:}\\; \\beta' = \\epsilon \\;\\text{in DeltaNet}, \\qquad \\epsilon = \\beta / (1 + \\beta |k|^2)

A decay per head is added to `g_k`, or makes the delta rule the gated one. For comparisons.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_longhorn.hosts import Arguments, StepOptions

# the logarithm of a decay that leaves nothing; sums with smaller ones would lose the others' digits
LEAST_LOG_DECAY = -100.


def chunk_longhorn_by_fla(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, **options: Any) -> Any:
    """:func:`fla_longhorn.ops.chunk_longhorn` of `beta` `[B, T, H]`, tensors of one 16-bit dtype and no decay per channel.

    Raises:
        ValueError: `beta` or `g` has another shape, or doubled steps in the diagonal form, whose decays GLA does not have.
        TypeError: an argument that the operator does not have.
    """
    args = Arguments(q, k, v, beta, 1.0 if scale is None else scale, **options)
    for name, x in (('beta', beta), ('g', args.g)):
        if x is not None and x.dim() != 3:
            raise ValueError(f'{name} must have the shape [B, T, H], got {list(x.shape)}')
    if args.step_options.factor != 1 and not args.exact:
        raise ValueError('allow_neg_eigval must be False in the diagonal form by GLA, whose decays are positive, got True')
    return chunk_scalar_beta(args)


def chunk_scalar_beta(args: Arguments) -> tuple[Tensor, Tensor | None]:
    """`o` and the final state, as :func:`fla_longhorn.ops.chunk_longhorn` returns them."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gla import chunk_gla

    q, k, v, initial_state, D, z = args.q, args.k, args.v, args.initial_state, args.D, args.z
    eps, log_decay = steps(k, args.beta, args.step_options)
    if initial_state is not None and args.state_v_first:
        initial_state = initial_state.mT
    options = dict(
        scale=float(args.scale), output_final_state=args.output_final_state, cu_seqlens=args.cu_seqlens,
        initial_state=None if initial_state is None else initial_state.float().contiguous(),
    )
    g = None if args.g is None else args.g.float().clamp_min(LEAST_LOG_DECAY)
    if args.exact and g is not None:
        o, final_state = chunk_gated_delta_rule(q, k, v, g, eps, **options)
    elif args.exact:
        o, final_state = chunk_delta_rule(q, k, v, eps, **options)
    else:
        log_decay = log_decay if g is None else log_decay + g[..., None]
        o, final_state = chunk_gla(q, k, (eps[..., None] * v).to(v.dtype), log_decay, **options)
    if D is not None or z is not None:
        o = o.float()
        o = o if D is None else o + D.float() * v.float()
        o = (o if z is None else o * F.silu(z.float())).to(v.dtype)
    if final_state is not None and args.state_v_first:
        final_state = final_state.mT
    return o, final_state


def steps(k: Tensor, beta: Tensor, options: StepOptions) -> tuple[Tensor, Tensor]:
    """`eps [B, T, H]` and, where it is not doubled, `log(1 - eps k^2) [B, T, H, K]`, float32 or float64.

    `1 - eps k_j^2 = (1 + beta (|k|^2 - k_j^2)) / (1 + beta |k|^2)` does not cancel where `eps k_j^2` is near 1.
    """
    k, beta = (x if x.dtype == torch.float64 else x.float() for x in (k, beta))
    beta = beta.sigmoid() if options.use_beta_sigmoid_in_kernel else beta
    squares = k.square()
    # the sum of the other entries' squares, by sums alone: a difference would cancel, TF32 round a product
    before = F.pad(squares[..., :-1], (1, 0)).cumsum(-1)
    behind = F.pad(squares[..., 1:].flip(-1), (1, 0)).cumsum(-1).flip(-1)
    others = before + behind
    norm = 1 + beta * squares.sum(-1)
    return options.factor * beta / norm, torch.log1p(beta[..., None] * others) - torch.log(norm)[..., None]
