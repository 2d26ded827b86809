"""`chunk_longhorn`: training and prefill, parallel along the sequence where the batch alone does not fill the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_longhorn.ops.arguments import Arguments, Result
from fla_longhorn.ops.operator import check_and_run

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def chunk_longhorn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, exact: bool = False,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: torch.Tensor | None = None, cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: FLACPContext | None = None, return_intermediate_states: bool = False,
    allow_neg_eigval: bool = False, g: torch.Tensor | None = None, disable_recompute: bool = False,
) -> Result:
    r"""Longhorn's update (arXiv 2407.14207) over whole sequences.

    .. math::
        \epsilon_t = \beta_t / (1 + \beta_t |k_t|^2), \qquad
        o_t = (\mathrm{scale} \cdot q_t^\top S_t + D \odot v_t) \odot \mathrm{silu}(z_t)

    with the diagonal form (Eq. 7), or with `exact` the closed form (Theorem 3.1) that it approximates:

    .. math::
        S_t = (1 - k_t^2 \otimes \epsilon_t) \odot S_{t-1} + k_t \otimes (\epsilon_t \odot v_t) \\
        S_t = S_{t-1} + k_t \otimes \epsilon_t \odot (v_t - k_t^\top S_{t-1})

    Args:
        q, k (torch.Tensor):
            Queries and keys `[B, T, H, K]`, 1 <= K <= 256, shared by the head's channels. Keys need no normalisation.
        v (torch.Tensor):
            Values `[B, T, H, V]` (the paper's x).
        beta (torch.Tensor):
            Step sizes in (0, 1), `[B, T, H, V]` (one per channel) or `[B, T, H]` (one per head).
        scale (float, Optional):
            Factor of the queries. Default: `None`, which means 1.0, as in the paper.
        initial_state (torch.Tensor, Optional):
            State before the first token, `[N, H, K, V]` for `N` sequences. Default: `None`, which means zero.
        output_final_state (bool, Optional):
            Whether to return the state after the last token. Default: `False`.
        exact (bool, Optional):
            The exact form. Default: `False`, the diagonal one, as in the paper.
        D (torch.Tensor, Optional):
            Weight of the skip connection, `[H, V]`. Default: `None`.
        z (torch.Tensor, Optional):
            Output gate `[B, T, H, V]`; the output is multiplied by `silu(z)`. Default: `None`.
        use_beta_sigmoid_in_kernel (bool, Optional):
            Whether `beta` holds logits. Default: `False`.
        state_v_first (bool, Optional):
            Whether the states are `[N, H, V, K]`. Default: `False`.
        cu_seqlens (torch.Tensor, Optional):
            Boundaries `[N + 1]` (int32 or int64, from 0 to T) of sequences packed into one row; B must be 1.
        cu_seqlens_cpu (torch.Tensor, Optional):
            Host copy of `cu_seqlens`, which saves a host-device synchronisation. On a GPU only the copy is checked.
        cp_context (FLACPContext, Optional):
            fla's context of this rank (`fla.ops.cp.build_cp_context`): the tokens are this rank's part of sequences split over
            ranks. It replaces `cu_seqlens`; a state can be neither given nor returned. D's gradient is this rank's part.
        return_intermediate_states (bool, Optional):
            Whether to return a third tensor, the states before every n-th token with `n = checkpoint_interval(K)` of
            `fla_longhorn.ops.checkpoints`. Without gradients only. Default: `False`.
        allow_neg_eigval (bool, Optional):
            Whether the step is doubled, `eps = 2 beta / (1 + beta |k|^2)`: what is stored under the key can flip its sign, as
            its eigenvalue `(1 - x) / (1 + x)` with `x = beta |k|^2` is in (-1, 1]. Default: `False`.
        g (torch.Tensor, Optional):
            Log decay of the state before each step, `[B, T, H, V]` (fla's `gv`) or `[B, T, H]`: `S_{t-1}` above becomes
            `exp(g_t) * S_{t-1}`. Any g <= 0 is supported; `-inf` resets the state. Default: `None`, no decay.
        disable_recompute (bool, Optional):
            Whether forward keeps what it adds to the state, 2 bytes per token and channel, so that backward does not compute
            it again. It is then bfloat16 in forward too, which outputs and states show: an error of 0.3% in place of 0.2% and
            0.04%. So only in the exact form, in bfloat16 on NVIDIA GPUs, up to K = 128, with one step size per channel, and
            no decay or one per head; elsewhere, with `allow_neg_eigval` or over ranks, it changes nothing. Default: `False`.

    Returns:
        o (torch.Tensor):
            `[B, T, H, V]` in the dtype of `v`.
        final_state (torch.Tensor or None):
            float32 `[N, H, K, V]` if requested, else `None`.
        states (torch.Tensor):
            Only with `return_intermediate_states`: float32 `[B, ceil(T / n), H, K, V]`, of packed sequences one after another.

    Inputs are float16, bfloat16 or float32 with any strides; the state and all sums are float32. Differentiable in every
    tensor, the states included; a second derivative raises. Deterministic. Limits for large keys: `docs/operators.md`.

    Raises:
        ValueError: a shape, device or boundary does not fit.
        TypeError: a type or dtype does not fit.

    Examples::
        >>> q, k = torch.randn(2, 2, 64, 1, 16)
        >>> v, beta = torch.randn(2, 64, 1, 32), torch.rand(2, 64, 1, 32)
        >>> o, state = chunk_longhorn(q, k, v, beta, exact=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 64, 1, 32]), torch.Size([2, 1, 16, 32]))
    """
    args = Arguments(
        q=q, k=k, v=v, beta=beta, scale=1.0 if scale is None else scale, initial_state=initial_state,
        output_final_state=output_final_state, exact=exact, D=D, z=z, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, allow_neg_eigval=allow_neg_eigval, g=g,
        disable_recompute=disable_recompute,
    )
    return check_and_run(args, cu_seqlens_cpu, cp_context, parallel=True, intermediate=return_intermediate_states)
