"""One step size per head, by fla's kernels: the diagonal update is then GLA, the exact one the (gated) delta rule.

.. math::
    \\mathrm{diagonal:}\\; g_k = \\log(1 - \\epsilon k^2),\\; v' = \\epsilon v \\;\\text{in GLA}, \\qquad
    \\mathrm{exact:}\\; \\beta' = \\epsilon \\;\\text{in DeltaNet}, \\qquad \\epsilon = \\beta / (1 + \\beta |k|^2)

GPU calls in one 16-bit dtype use fla's kernels where these should be faster: for the diagonal update from K = 64 on, because
the cost of Longhorn's kernels grows with K, while GLA's are matrix products (at K = 32, D and z in PyTorch cost more than that
saves). The exact update's own kernels are such products too, and move fewer bytes than the delta rule's
(`python -m benchmarks traffic`). A decay per head is added to `g_k`, or makes the delta rule the gated one.
`FLA_LONGHORN_SCALAR_BETA=fla` or `=own` overrides the choice.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments, StepOptions

ROUTES = ('auto', 'fla', 'own')
# smallest K of the diagonal update for which `auto` uses fla
FLA_STATE_SIZE = 64
# the logarithm of a decay that leaves nothing; sums with smaller ones would lose the others' digits
LEAST_LOG_DECAY = -100.


def applies(args: Arguments) -> bool:
    """Whether fla's kernels support these arguments, and are requested or expected to be faster."""
    if args.beta.dim() != 3:
        return False
    route = os.environ.get('FLA_LONGHORN_SCALAR_BETA') or 'auto'
    if route not in ROUTES:
        raise ValueError(f'FLA_LONGHORN_SCALAR_BETA must be one of {ROUTES}, got {route!r}')
    dtype = args.q.dtype
    # GLA's decays are logarithms, so never negative
    if args.step_options.factor != 1 and not args.exact:
        return False
    if args.q.device.type != 'cuda' or args.g is not None and args.g.dim() != 3:
        return False
    if not dtype == args.k.dtype == args.v.dtype or dtype not in (torch.float16, torch.bfloat16):
        return False
    return route == 'fla' or route == 'auto' and not args.exact and args.q.shape[-1] >= FLA_STATE_SIZE


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
