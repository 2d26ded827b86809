"""The PyTorch backend, for CPUs without Numba; it runs on any device.

Strips of `STRIP` tokens run one after the other. Backward restarts from the states that forward saved every
`checkpoint_interval(K)` tokens. Tensors inside are float32 with time first, for L tokens: q, k `[L, B, H, K]`, v, eps and g's
decays `[L, B, H, V]`; a state is `[B, H, K, V]`. With `P_t = decay_t * S_{t-1}`, or `S_{t-1}`, the updates are

    diagonal: S_t = a_t * S_{t-1} + k_t (x) u_t,    a_t = decay_t (1 - k_t^2 (x) eps_t),    u_t = eps_t v_t
    exact:    S_t = P_t + k_t (x) (eps_t r_t),      r_t = v_t - k_t^T P_t

all that is independent of the state at once, and then the state token by token.
"""

from __future__ import annotations

import torch

from fla_longhorn.ops.arguments import Arguments, StepOptions
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool

# tokens whose states `[STRIP, B, H, K, V]` are held in memory at once
STRIP = 16


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: torch.Tensor | None = None, pool: Pool | None = None,
):
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`; `parallel` has no effect."""
    B, T, H, K, V = args.sizes
    N, is_varlen = args.num_sequences, args.cu_seqlens is not None
    update, decay = (exact_states if args.exact else diagonal_states), decays(args)
    q, k, v = (time_first(x) for x in (args.q, args.k, args.v))
    eps = step_sizes(k, time_first(args.beta), args.step_options)[0].expand_as(v)
    h = initial_states(args, args.initial_state if pool is None else pool.gather(N))
    C = checkpoint_interval(K)
    o = torch.empty_like(v)
    # packed sequences leave some slots unwritten; they hold zeros
    new = q.new_zeros if is_varlen else q.new_empty
    states = new((num_checkpoints(B, T, N, C, is_varlen), H, K, V) if save_states else 0)
    for i, (rows, bos, eos, slots) in enumerate(sequence_spans(B, T, K, args.cu_seqlens)):
        sequences = slice(i, i + 1) if is_varlen else slice(0, N)
        S = h[sequences]
        for t in range(bos, eos, STRIP):
            if save_states and (t - bos) % C == 0:
                states[slots + (t - bos) // C] = S
            strip = slice(t, min(t + STRIP, eos)), rows
            passed = update(k[strip], v[strip], eps[strip], S, *(x[strip] for x in decay))[0]
            o[strip], S = read(q[strip], passed[1:]) * args.scale, passed[-1]
        h[sequences] = S
    if args.D is not None:
        o += args.D.float() * v
    if args.z is not None:
        o *= torch.nn.functional.silu(time_first(args.z))
    if args.output_final_state:
        h = h.transpose(-1, -2).contiguous() if args.state_v_first else h
        if pool is not None:
            pool.scatter(h)
        final_state = h if final_state is None else final_state.copy_(h)
    else:
        final_state = q.new_empty(0)
    o = batch_first(o, args.v)
    return o if pool is None else pool.without_absent(o, args.cu_seqlens), final_state, states


def longhorn_bwd(do, dht, states, args: Arguments, *, parallel: bool):
    """Return the gradients of q, k, v, beta, initial_state, D, z and g, each like its input, or `None`."""
    B, T, _, K, _ = args.sizes
    inputs, D, z, scale = (args.q, args.k, args.v, args.beta), args.D, args.z, args.scale
    update, decay = (exact_states if args.exact else diagonal_states), decays(args)
    strip_backward = exact_backward if args.exact else diagonal_backward
    q, k, v, beta, do = (time_first(x) for x in (*inputs, do))
    eps, chain = step_sizes(k, beta, args.step_options)
    eps = eps.expand_as(v)
    dh = initial_states(args, dht)
    gate = None if z is None else torch.sigmoid(time_first(z))
    dy = do if z is None else do * time_first(z) * gate
    C = checkpoint_interval(K)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    # y has the outputs before z gates them
    du, deps, y = (torch.empty_like(v) for _ in range(3))
    dg = [torch.empty_like(v) for _ in decay]
    for i, (rows, bos, eos, slots) in enumerate(sequence_spans(B, T, K, args.cu_seqlens)):
        sequences = slice(0, B) if args.cu_seqlens is None else slice(i, i + 1)
        G = dh[sequences]
        for t_c in reversed(range(bos, eos, C)):
            strips = [slice(t, min(t + STRIP, eos, t_c + C)) for t in range(t_c, min(t_c + C, eos), STRIP)]
            starts = [states[slots + (t_c - bos) // C]]
            for t in strips[:-1]:
                starts.append(update(k[t, rows], v[t, rows], eps[t, rows], starts[-1], *(x[t, rows] for x in decay))[0][-1])
            for t in reversed(strips):
                strip = t, rows
                grads, G = strip_backward(
                    q[strip], k[strip], v[strip], eps[strip], scale * dy[strip], starts.pop(), G, *(x[strip] for x in decay),
                )
                for whole, part in zip((dq, dk, du, deps, y, *dg), grads, strict=True):
                    whole[strip] = part
        dh[sequences] = G

    dk -= 2 / args.step_options.factor * k * (deps * eps.square()).sum(-1, keepdim=True)
    dbeta = deps * chain
    if inputs[3].dim() == 3:
        dbeta = dbeta.sum(-1)
    dv = eps * du
    y *= scale
    dD, dz = None, None
    if D is not None:
        y += D.float() * v
        dv += D.float() * dy
        dD = (dy * v).sum((0, 1)).to(D.dtype)
    if z is not None and gate is not None:
        dz = batch_first(do * y * gate * (1 + time_first(z) * (1 - gate)), z)
    if args.initial_state is None:
        dh = None
    elif args.state_v_first:
        dh = dh.transpose(-1, -2).contiguous()
    of_g = None if args.g is None else batch_first(dg[0].sum(-1) if args.g.dim() == 3 else dg[0], args.g)
    return (*(batch_first(dx, x) for dx, x in zip((dq, dk, dv, dbeta), inputs, strict=True)), dh, dD, dz, of_g)


def view_states(states, args: Arguments):
    return states


def decays(args: Arguments):
    """`exp(g) [T, B, H, V]`, if any, in a list."""
    if args.g is None:
        return []
    g = time_first(args.g)
    return [(g[..., None] if g.dim() == 3 else g).expand(*g.shape[:3], args.v.shape[-1]).exp()]


def step_sizes(k, beta, options: StepOptions):
    """`eps = c b / (1 + b |k|^2)` and `deps/dbeta`, `[T, B, H, V]`, or `[T, B, H, 1]` for one step size per head."""
    if beta.dim() == 3:
        beta = beta[..., None]
    b = beta.sigmoid() if options.use_beta_sigmoid_in_kernel else beta
    norm = k.square().sum(-1, keepdim=True)
    # NaN where the step size underflows, rather than a zero that looks valid
    f = 1 / (1 + b * norm) + 0 * (4 * norm)
    chain = options.factor * f.square()
    return options.factor * b * f, chain * b * (-beta).sigmoid() if options.use_beta_sigmoid_in_kernel else chain


def sequence_spans(B: int, T: int, K: int, cu_seqlens):
    """(rows, first token, end, first slot of each row in the saved states) of sequences that run together."""
    C = checkpoint_interval(K)
    if cu_seqlens is None:
        slots = (T + C - 1) // C
        return [(slice(0, B), 0, T, torch.arange(0, B * slots, slots, dtype=torch.int64, device='cpu'))]
    bounds = cu_seqlens.tolist()
    return [
        (slice(0, 1), bos, eos, torch.tensor([bos // C + i_n], dtype=torch.int64, device='cpu'))
        for i_n, (bos, eos) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
    ]


def initial_states(args: Arguments, state):
    """A new float32 `[N, H, K, V]`: a copy of `state`, or zeros."""
    if state is None:
        _, _, H, K, V = args.sizes
        return args.q.new_zeros(args.num_sequences, H, K, V, dtype=torch.float32)
    state = state.transpose(-1, -2) if args.state_v_first else state
    return state.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def time_first(x):
    """`[B, T, ...]` in any dtype as contiguous float32 `[T, B, ...]`."""
    return x.detach().float().transpose(0, 1).contiguous()


def batch_first(x, like):
    """`[T, B, ...]` as a contiguous `[B, T, ...]` in the dtype of `like`."""
    return x.transpose(0, 1).to(like.dtype).contiguous()


def read(k, S):
    """`k^T S`, `[..., V]`."""
    return (k[..., None, :] @ S)[..., 0, :]


def diagonal_states(k, v, eps, S, decay=None):
    """The states `[L + 1, B, H, K, V]` around L tokens, from `S`, and `a [L, B, H, K, V]`."""
    a = 1 - k.square()[..., None] * eps[..., None, :]
    if decay is not None:
        a *= decay[..., None, :]
    states = k.new_empty(k.shape[0] + 1, *S.shape)
    states[0] = S
    torch.mul(k[..., None], (eps * v)[..., None, :], out=states[1:])
    for t in range(k.shape[0]):
        states[t + 1].addcmul_(a[t], states[t])
    return states, a


def diagonal_backward(q, k, v, eps, dy, S, G, decay=None):
    """Return `(dq, dk, du, deps, y)`, with a decay dg too, and the gradient of `S`; `G` is that of the final state.

    With `G_t` the gradient of `S_t` and `r = v - k * P`: `dq = sum_v dy S_t`, `du = sum_j G_t k`, `deps = sum_j G_t k r`,
    `dk = sum_v eps G_t (r - k P)` (without the part through eps), `y = sum_j q S_t`, and of the decay's logarithm,
    `dg = sum_j G_t a S_{t-1}`.
    """
    S, a = diagonal_states(k, v, eps, S, decay)
    dS = q[..., None] * dy[..., None, :]
    dS[-1] += G
    for t in reversed(range(k.shape[0] - 1)):
        dS[t].addcmul_(a[t + 1], dS[t + 1])
    P = S[:-1] if decay is None else S[:-1] * decay[..., None, :]
    r = torch.addcmul(v[..., None, :], k[..., None], P, value=-1)
    dq, du, deps, y = (S[1:] @ dy[..., None])[..., 0], read(k, dS), read(k, dS * r), read(q, S[1:])
    dg = [] if decay is None else [(dS * a * S[:-1]).sum(-2)]
    dk = (dS * r.addcmul_(k[..., None], P, value=-1) @ eps[..., None])[..., 0]
    return (dq, dk, du, deps, y, *dg), a[0] * dS[0]


def exact_states(k, v, eps, S, decay=None):
    """The states `[L + 1, B, H, K, V]` around L tokens, and the residuals `r [L, B, H, V]`."""
    states, residuals = [S], []
    for t, (k_t, v_t, eps_t) in enumerate(zip(k, v, eps, strict=True)):
        P = states[-1] if decay is None else decay[t][..., None, :] * states[-1]
        residuals.append(v_t - read(k_t, P))
        states.append(torch.addcmul(P, k_t[..., None], (eps_t * residuals[-1])[..., None, :]))
    return torch.stack(states), torch.stack(residuals)


def exact_backward(q, k, v, eps, dy, S, G, decay=None):
    """As :func:`diagonal_backward`.

    With `u = eps r`, `du = k^T G_t` and `w = eps du`, the gradient of `P_t` is `G_t - k (x) w`, `dk = sum_v G_t u - P_t w`,
    `deps = du r` and `dg = sum_j (G_t - k w) P_t`.
    """
    S, R = exact_states(k, v, eps, S, decay)
    P = S[:-1] if decay is None else S[:-1] * decay[..., None, :]
    dk, du, dg = torch.empty_like(k), torch.empty_like(v), torch.empty_like(v)
    for t in reversed(range(len(k))):
        G = torch.addcmul(G, q[t][..., None], dy[t][..., None, :])
        du[t] = read(k[t], G)
        w = eps[t] * du[t]
        dk[t] = ((eps[t] * R[t])[..., None, :] * G - w[..., None, :] * P[t]).sum(-1)
        G = torch.addcmul(G, k[t][..., None], w[..., None, :], value=-1)
        if decay is not None:
            dg[t] = (G * P[t]).sum(-2)
            G = decay[t][..., None, :] * G
    dq = (S[1:] @ dy[..., None])[..., 0]
    return (dq, dk, du, du * R, read(q, S[1:]), *([] if decay is None else [dg])), G
