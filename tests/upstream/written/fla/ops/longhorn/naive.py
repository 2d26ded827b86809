import torch


def naive_recurrent_longhorn(
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
    Reference implementation of Longhorn in PyTorch, in float64 if v is, else in float32.
    The arguments are those of `chunk_longhorn`.
    """
    dtype = v.dtype
    q, k, v, beta = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v, beta))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid()
    beta = beta[..., None] if beta.dim() == 3 else beta
    # [B, T, H, V] or [B, T, H, 1]
    eps = (2 if allow_neg_eigval else 1) * beta / (1 + beta * k.square().sum(-1, keepdim=True))

    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    # [N, H, K, V]
    h = v.new_zeros(q.shape[0] if cu_seqlens is None else len(bounds) - 1, q.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None:
        h = h + (initial_state.transpose(-1, -2) if state_v_first else initial_state)
    o, ht = [], []
    for n, (bos, eos) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        S = h if cu_seqlens is None else h[n:n + 1]
        for t in range(bos, eos):
            k_t, eps_t, v_t = k[:, t, :, :, None], eps[:, t, :, None], v[:, t, :, None]
            if g is not None:
                S = S * g[:, t].to(S.dtype).exp().reshape(*S.shape[:2], 1, -1)
            if exact:
                S = S + k_t * (eps_t * (v_t - (k_t * S).sum(-2, keepdim=True)))
            else:
                S = S * (1 - k_t.square() * eps_t) + k_t * (eps_t * v_t)
            o.append((q[:, t, :, :, None] * S).sum(-2))
        ht.append(S)
    S = torch.cat(ht)
    o = torch.stack(o, 1) * (1 if scale is None else scale)
    if D is not None:
        o = o + D * v
    if z is not None:
        o = o * torch.nn.functional.silu(z.to(o.dtype))
    S = S.transpose(-1, -2) if state_v_first else S
    return o.to(dtype), S if output_final_state else None
