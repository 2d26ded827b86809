"""The PyTorch backend, for CPUs without Numba; it runs on any device.

Strips of `STRIP` tokens run one after the other, by :mod:`fla_longhorn.ops.torch.diagonal`,
:mod:`fla_longhorn.ops.torch.exact`. Backward restarts from
the states that forward saved every `checkpoint_interval(K)` tokens. Tensors inside are float32 with time first, `[L, B, H, *]`
for L tokens.
"""

from __future__ import annotations

import torch

from fla_longhorn.ops.arguments import Arguments, StepOptions
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool
from fla_longhorn.ops.torch import diagonal as diagonal_update
from fla_longhorn.ops.torch import exact as exact_update

# tokens whose states `[STRIP, B, H, K, V]` are held in memory at once
STRIP = 16


def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: torch.Tensor | None = None, pool: Pool | None = None,
):
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`; `parallel` has no effect."""
    B, T, H, K, V = args.sizes
    N, is_varlen = args.num_sequences, args.cu_seqlens is not None
    update, decay = choose_update(args)
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
            y, S = update.strip_forward(q[strip], k[strip], v[strip], eps[strip], S, *(x[strip] for x in decay))
            o[strip] = y * args.scale
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
    update, decay = choose_update(args)
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
                starts.append(update.strip_end(
                    k[t, rows], v[t, rows], eps[t, rows], starts[-1], *(x[t, rows] for x in decay),
                ))
            for t in reversed(strips):
                strip = t, rows
                grads, G = update.strip_backward(
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


def choose_update(args: Arguments):
    """The module of the update, and its decays `exp(g) [T, B, H, V]`, if any, in a list."""
    update = exact_update if args.exact else diagonal_update
    if args.g is None:
        return update, []
    g = time_first(args.g)
    g = (g[..., None] if g.dim() == 3 else g).expand(*g.shape[:3], args.v.shape[-1])
    return update, [g.exp()]


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
