import torch
from fla.ops.longhorn.arguments import TENSORS, Arguments
from fla.ops.longhorn.triton import longhorn_bwd, longhorn_fwd
from fla.utils import autocast_custom_bwd, autocast_custom_fwd, input_guard


class LonghornFunction(torch.autograd.Function):

    @staticmethod
    @input_guard
    @autocast_custom_fwd
    def forward(
        ctx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None,
        D: torch.Tensor | None,
        z: torch.Tensor | None,
        g: torch.Tensor | None,
        cu_seqlens: torch.LongTensor | None,
        options: Arguments,
        chunked: bool,
    ):
        args = options._replace(
            q=q,
            k=k,
            v=v,
            beta=beta,
            initial_state=initial_state,
            D=D,
            z=z,
            g=g,
            cu_seqlens=cu_seqlens,
        )
        # backward starts from saved states
        o, ht, states = longhorn_fwd(args, save_states=any(ctx.needs_input_grad), parallel=chunked)
        ctx.save_for_backward(q, k, v, beta, initial_state, D, z, g, cu_seqlens, states)
        ctx.options = options
        return o, ht if options.output_final_state else None

    @staticmethod
    @input_guard
    @autocast_custom_bwd
    def backward(ctx, do, dht):
        q, k, v, beta, initial_state, D, z, g, cu_seqlens, states = ctx.saved_tensors
        args = ctx.options._replace(
            q=q,
            k=k,
            v=v,
            beta=beta,
            initial_state=initial_state,
            D=D,
            z=z,
            g=g,
            cu_seqlens=cu_seqlens,
        )
        dq, dk, dv, db, dh0, dD, dz, dg = longhorn_bwd(do, dht, states, args, parallel=True)
        return dq, dk, dv, db, dh0, dD, dz, dg, None, None, None


def check_inputs(args: Arguments) -> None:
    B, T, H, K, V = args.sizes
    if args.cu_seqlens is not None and B != 1:
        raise ValueError(
            f"The batch size is expected to be 1 rather than {B} when using `cu_seqlens`. "
            f"Please flatten variable-length inputs before processing."
        )
    if K > 256:
        raise ValueError(f"The state size K is expected to be at most 256 rather than {K}.")
    per_head = (B, T, H)
    per_channel = (B, T, H, V)
    for name, shapes in {
        'v': [(B, T, H, V)],
        'beta': [per_head, (B, T, H, V)],
        'initial_state': [args.state_shape],
        'D': [(H, V)],
        'z': [(B, T, H, V)],
        'g': [per_head, per_channel],
    }.items():
        x = getattr(args, name)
        if x is not None and x.shape not in shapes:
            expected = ' or '.join(map(str, shapes))
            raise ValueError(f"The shape of `{name}` is expected to be {expected} rather than {tuple(x.shape)}.")


@torch.compiler.disable
def chunk_longhorn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    exact: bool = True,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    allow_neg_eigval: bool = False,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""
    The exact update of Longhorn (arXiv 2407.14207, Theorem 3.1), chunk by chunk:

    .. math::
        \epsilon_t = \beta_t / (1 + \beta_t |k_t|^2), \qquad
        S_t = e^{g_t} S_{t-1} + k_t \otimes \epsilon_t \odot (v_t - k_t^\top e^{g_t} S_{t-1}), \\
        o_t = (\mathrm{scale} \cdot q_t^\top S_t + D \odot v_t) \odot \mathrm{silu}(z_t)

    Args:
        q (torch.Tensor):
            Queries of shape `[B, T, H, K]` with K <= 256.
        k (torch.Tensor):
            Keys of shape `[B, T, H, K]`. They need no normalization.
        v (torch.Tensor):
            Values of shape `[B, T, H, V]`.
        beta (torch.Tensor):
            Step sizes in (0, 1) of shape `[B, T, H, V]` or, for all channels of a head, `[B, T, H]`.
        scale (float, Optional):
            Factor of the queries. Default: `None`, which is 1 as in the paper.
        initial_state (torch.Tensor, Optional):
            Initial state of shape `[N, H, K, V]` for `N` input sequences. Default: `None`.
        output_final_state (bool, Optional):
            Whether to output the final state of shape `[N, H, K, V]`. Default: `False`.
        exact (bool, Optional):
            Whether the update is exact, instead of its diagonal approximation (Eq. 7). Default: `True`.
        D (torch.Tensor, Optional):
            Weights of the skip connection of shape `[H, V]`. Default: `None`.
        z (torch.Tensor, Optional):
            Output gate of shape `[B, T, H, V]`. Default: `None`.
        use_beta_sigmoid_in_kernel (bool, Optional):
            Whether `beta` are logits. Default: `False`.
        state_v_first (bool, Optional):
            Whether states are of shape `[N, H, V, K]`. Default: `False`.
        cu_seqlens (torch.LongTensor, Optional):
            Cumulative sequence lengths of shape `[N+1]` used for variable-length training,
            consistent with the FlashAttention API.
        allow_neg_eigval (bool, Optional):
            Whether step sizes are doubled, so that eigenvalues are in (-1, 1]. Default: `False`.
        g (torch.Tensor, Optional):
            Log decays of shape `[B, T, H]`, at most 0; or `[B, T, H, V]`, one per channel. Default: `None`.

    Returns:
        o (torch.Tensor):
            Outputs of shape `[B, T, H, V]`.
        final_state (torch.Tensor):
            Final state in float32 if `output_final_state=True` else `None`.

    Examples::
        >>> import torch
        >>> from fla.ops.longhorn import chunk_longhorn
        >>> B, T, H, K, V = 4, 2048, 4, 16, 512
        >>> q, k = torch.randn(2, B, T, H, K, device='cuda')
        >>> v, beta = torch.randn(2, B, T, H, V, device='cuda')
        >>> o, ht = chunk_longhorn(q, k, v, beta.sigmoid(), output_final_state=True)
        # for variable-length inputs, the batch size `B` is expected to be 1 and `cu_seqlens` is required
        >>> q, k, v, beta = (x.flatten(0, 1)[None] for x in (q, k, v, beta))
        >>> cu_seqlens = q.new_tensor([0, 2048, 4096, 6144, 8192], dtype=torch.long)
        >>> o, ht = chunk_longhorn(q, k, v, beta.sigmoid(), output_final_state=True, cu_seqlens=cu_seqlens)
    """
    args = Arguments(
        q=q,
        k=k,
        v=v,
        beta=beta,
        scale=1.0 if scale is None else float(scale),
        initial_state=initial_state,
        output_final_state=output_final_state,
        exact=exact,
        D=D,
        z=z,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        allow_neg_eigval=allow_neg_eigval,
        g=g,
    )
    check_inputs(args)
    return LonghornFunction.apply(*args.differentiable, cu_seqlens, args.without(TENSORS), True)
