"""`chunk_longhorn`: training and prefill, parallel along the sequence where the batch alone does not fill the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_longhorn.ops.apply import check_and_run
from fla_longhorn.ops.arguments import Arguments, Result
from fla_longhorn.ops.context_parallel import run_on_part
from fla_longhorn.ops.gate import apply_gate

if TYPE_CHECKING:
    from fla.ops.cp import FLACPContext


def chunk_longhorn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, scale: float | None = None,
    initial_state: torch.Tensor | None = None, output_final_state: bool = False, exact: bool = False,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: torch.Tensor | None = None, cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: FLACPContext | None = None, return_intermediate_states: bool = False,
    allow_neg_eigval: bool = False, g: torch.Tensor | None = None,
    use_gate_in_kernel: bool = False, A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> Result:
    r"""Longhorn's update (arXiv 2407.14207) over whole sequences.

    .. math::
        \epsilon_t = \beta_t / (1 + \beta_t |k_t|^2), \qquad
        o_t = (\mathrm{scale} \cdot q_t^\top S_t + D \odot v_t) \odot \mathrm{silu}(z_t)

    with the diagonal update (Eq. 7), or with `exact` the closed form (Theorem 3.1, Eq. 6) that it approximates:

    .. math::
        S_t = (1 - k_t^2 \otimes \epsilon_t) \odot S_{t-1} + k_t \otimes (\epsilon_t \odot v_t) \\
        S_t = S_{t-1} + k_t \otimes \epsilon_t \odot (v_t - k_t^\top S_{t-1})

    Args:
        q (torch.Tensor):
            Queries of shape `[B, T, H, K]`, 1 <= K <= 256, shared by the head's channels.
        k (torch.Tensor):
            Keys of shape `[B, T, H, K]`. They need no normalisation: the update is stable, and results are finite, up to
            `|k|` of about 1e17. Beyond 2^63 (9e18) the step size underflows float32: results are NaN on the CPU, and on a
            GPU the token does not change the state. For large keys small gradients underflow: that of `beta` from `|k|` of
            about 1e4 on, that of `k` from 1e7 on. If one entry is nearly all of `|k|^2`, as with K = 1, `1 - eps k^2`
            cancels: from `|k|` of about 30 on, what remains of an old state loses digits, and so does its gradient.
        v (torch.Tensor):
            Values of shape `[B, T, H, V]` (the paper's x).
        beta (torch.Tensor):
            Step sizes in (0, 1), of shape `[B, T, H, V]` (one per channel) or `[B, T, H]` (one per head).
        scale (float, Optional):
            Factor applied to the queries. Default: `None`, which means 1.0, as in the paper.
        initial_state (torch.Tensor, Optional):
            State before the first token, of shape `[N, H, K, V]` for `N` sequences. Default: `None`, which means zero.
        output_final_state (bool, Optional):
            Whether to return the state after the last token. Default: `False`.
        exact (bool, Optional):
            Whether to solve each token's online learning problem exactly, not by its diagonal approximation.
            Default: `False`, as in the paper.
        D (torch.Tensor, Optional):
            Weight of the skip connection, of shape `[H, V]`. Default: `None`.
        z (torch.Tensor, Optional):
            Output gate of shape `[B, T, H, V]`; the output is multiplied by `silu(z)`. Default: `None`.
        use_beta_sigmoid_in_kernel (bool, Optional):
            Whether `beta` holds logits; the kernel applies the sigmoid. Default: `False`.
        state_v_first (bool, Optional):
            Whether the states are `[N, H, V, K]` instead of `[N, H, K, V]`. Default: `False`.
        cu_seqlens (torch.Tensor, Optional):
            Boundaries `[N + 1]` (int32 or int64, from 0 to T) of sequences packed into one row; B must be 1.
            Empty sequences keep their initial state. Default: `None`.
        cu_seqlens_cpu (torch.Tensor, Optional):
            Host copy of `cu_seqlens`, so that checking it does not synchronise with the device. On a GPU only the copy is
            checked, and not compared with `cu_seqlens`, which the kernels read. Default: `None`.
        cp_context (FLACPContext, Optional):
            fla's context of this rank, from `fla.ops.cp.build_cp_context`: q, k, v, beta and z are this rank's tokens of
            sequences split over the ranks of its group. `cu_seqlens` is taken from it; `initial_state` and
            `output_final_state` must keep their defaults. D's gradient is this rank's part of the sum over ranks.
            Default: `None`.
        return_intermediate_states (bool, Optional):
            Whether to return a third tensor, the states before every n-th token, `n = checkpoint_interval(K)` of
            `fla_longhorn.ops.checkpoints`: a power of two, 128 for K = 16 and 256 from K = 32 on. Without gradients only.
            Default: `False`.
        allow_neg_eigval (bool, Optional):
            Whether the step is twice as long, `eps = 2 beta / (1 + beta |k|^2)`: the trapezoidal rule instead of implicit
            Euler. The eigenvalue of a token's key is then `(1 - x) / (1 + x)` with `x = beta |k|^2`, in (-1, 1]. It is
            negative for `x > 1`, so never with `|k| = 1` and `beta < 1`. The exact form in bfloat16 rounds up to twice as
            much, because less of an earlier error is forgotten. Default: `False`.
        g (torch.Tensor, Optional):
            Logarithms of decays, at most 0, of shape `[B, T, H, V]` (one per channel) or `[B, T, H]` (one per head). The state
            decays first, then takes the step: `S_t` is as above with `exp(g_t) * S_{t-1}` for `S_{t-1}`. Any is right,
            down to `-inf`, which starts anew; what it costs stands in `docs/exact.md`. A decay per channel is `gv` in fla,
            where `gated_oja_rule` takes another step with it. Default: `None`, no decay.
        use_gate_in_kernel (bool, Optional):
            Whether the logarithms of decays are computed from `g` here, in float32, by the formulas of fla's `chunk_kda`:
            `-exp(A_log) * softplus(g + dt_bias)`, or with a lower bound `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`.
            It is computed by PyTorch before the operator runs. Default: `False`.
        A_log (torch.Tensor, Optional):
            With `use_gate_in_kernel`, the logarithms of the heads' rates, `[H]`. Default: `None`, rates of one, with a
            `lower_bound` only.
        dt_bias (torch.Tensor, Optional):
            With `use_gate_in_kernel`, what is added to `g`: `[H * V]`, or `[H]` for one decay per head. Default: `None`.
        lower_bound (float, Optional):
            With `use_gate_in_kernel`, the least logarithm of a decay, such as -5. Default: `None`, none.

    Returns:
        o (torch.Tensor):
            Outputs of shape `[B, T, H, V]` in the dtype of `v`.
        final_state (torch.Tensor or None):
            float32 states of shape `[N, H, K, V]` (`[N, H, V, K]` with `state_v_first`) if requested, else `None`.
        states (torch.Tensor):
            Only with `return_intermediate_states`: float32 `[B, ceil(T / n), H, K, V]` (or `[..., V, K]`); those of packed
            sequences are concatenated, `[1, sum(ceil(T_i / n)), H, K, V]`.

    q, k, v, beta, D, z, g, A_log and dt_bias are float16, bfloat16 or float32, each with its own dtype and any strides; the
    state and all sums are float32. Differentiable in all of them and in `initial_state`, through `o` and `final_state`.
    Deterministic: two runs are bit-equal. `torch.func` transforms and forward-mode differentiation run the slow recurrence of
    :func:`fla_longhorn.ops.naive_recurrent_longhorn`; a second backward (`create_graph=True`) raises an error.

    Raises:
        ValueError: a shape, device or boundary does not fit. TypeError: a type or dtype does not.

    Examples::
        >>> q, k = torch.randn(2, 2, 64, 1, 16)
        >>> v, beta = torch.randn(2, 64, 1, 32), torch.rand(2, 64, 1, 32)
        >>> o, state = chunk_longhorn(q, k, v, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 64, 1, 32]), torch.Size([2, 1, 16, 32]))
    """
    args = Arguments(
        q=q, k=k, v=v, beta=beta, scale=1.0 if scale is None else scale, initial_state=initial_state,
        output_final_state=output_final_state, exact=exact, D=D, z=z, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, allow_neg_eigval=allow_neg_eigval,
        g=apply_gate(q, g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
    )
    if cp_context is not None:
        return run_on_part(args, cp_context, parallel=True, intermediate=return_intermediate_states)
    return check_and_run(args, cu_seqlens_cpu, parallel=True, intermediate=return_intermediate_states)
