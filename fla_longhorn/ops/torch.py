"""The PyTorch backend, for CPUs without Numba; it runs on any device.

Strips of `STRIP` tokens run one after the other. Backward restarts from the states that forward saved every
`checkpoint_interval(K)` tokens, and PyTorch differentiates each strip. Tensors inside are float32 with time first, for L
tokens: q, k `[L, B, H, K]`, v and eps `[L, B, H, V]`; a state is `[B, H, K, V]`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fla_longhorn.ops.arguments import Arguments, Gradients
from fla_longhorn.ops.checkpoints import checkpoint_interval, num_checkpoints
from fla_longhorn.ops.pool import Pool

# tokens whose states `[STRIP, B, H, K, V]` are held in memory at once, and inputs with a row for each token
STRIP = 16
PER_TOKEN = ('q', 'k', 'v', 'beta', 'z', 'g')


@torch.autocast('cpu', enabled=False)
@torch.autocast('cuda', enabled=False)
def longhorn_fwd(
    args: Arguments, *, save_states: bool, parallel: bool, final_state: torch.Tensor | None = None, pool: Pool | None = None,
):
    """Return `o [B, T, H, V]`, `final_state [N, H, K, V]` and `states [S, H, K, V]`; `parallel` has no effect."""
    B, T, H, K, V = args.sizes
    N, is_varlen, C = args.num_sequences, args.cu_seqlens is not None, checkpoint_interval(K)
    tokens, weights = time_first_inputs(args)
    h = initial_states(args, args.initial_state if pool is None else pool.gather(N))
    o = torch.empty_like(tokens['v'])
    # packed sequences leave some slots unwritten
    states = h.new_zeros((num_checkpoints(B, T, N, C, is_varlen), H, K, V) if save_states else 0)
    for i, (rows, bos, eos, slots) in enumerate(sequence_spans(B, T, K, args.cu_seqlens)):
        sequences = slice(i, i + 1) if is_varlen else slice(0, N)
        S = h[sequences]
        for t in range(bos, eos, STRIP):
            if save_states and (t - bos) % C == 0:
                states[slots + (t - bos) // C] = S
            strip = slice(t, min(t + STRIP, eos)), rows
            o[strip], S = run_strip({name: x[strip] for name, x in tokens.items()} | weights | {'S': S}, args)
        h[sequences] = S
    if args.output_final_state:
        h = h.transpose(-1, -2).contiguous() if args.state_v_first else h
        if pool is not None:
            pool.scatter(h)
        final_state = h if final_state is None else final_state.copy_(h)
    else:
        final_state = h.new_empty(0)
    o = batch_first(o, args.v)
    return o if pool is None else pool.without_absent(o, args.cu_seqlens), final_state, states


@torch.autocast('cpu', enabled=False)
@torch.autocast('cuda', enabled=False)
def longhorn_bwd(do, dht, states, args: Arguments, *, parallel: bool) -> Gradients:
    B, T, _, K, _ = args.sizes
    C = checkpoint_interval(K)
    tokens, weights = time_first_inputs(args)
    gradients = {name: torch.empty_like(x) for name, x in tokens.items()}
    do, dh = time_first(do), initial_states(args, dht)
    dD = None if args.D is None else torch.zeros_like(weights['D'])
    for i, (rows, bos, eos, slots) in enumerate(sequence_spans(B, T, K, args.cu_seqlens)):
        sequences = slice(0, B) if args.cu_seqlens is None else slice(i, i + 1)
        G = dh[sequences]
        for t_c in reversed(range(bos, eos, C)):
            strips = [slice(t, min(t + STRIP, eos, t_c + C)) for t in range(t_c, min(t_c + C, eos), STRIP)]
            inputs = [{name: x[t, rows] for name, x in tokens.items()} | weights for t in strips]
            starts = [states[slots + (t_c - bos) // C]]
            for strip in inputs[:-1]:
                starts.append(run_strip(strip | {'S': starts[-1]}, args)[1])
            for t, strip in zip(reversed(strips), reversed(inputs), strict=True):
                found = differentiate(strip | {'S': starts.pop()}, args, do[t, rows], G)
                for name, dx in gradients.items():
                    dx[t, rows] = found[name]
                G = found['S']
                if dD is not None:
                    dD += found['D']
        dh[sequences] = G
    if args.state_v_first:
        dh = dh.transpose(-1, -2).contiguous()
    return Gradients(
        **{name: batch_first(dx, getattr(args, name)) for name, dx in gradients.items()},
        initial_state=None if args.initial_state is None else dh,
        D=None if args.D is None or dD is None else dD.to(args.D.dtype),
    )


def differentiate(x, args: Arguments, do, G):
    """The gradients of a strip's inputs, by name, from those of its outputs and of the state behind it."""
    # private, as is all that lets autograd record inside an operator of `torch.library`, also under a mode of dispatch
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    recording = torch._C._ForceDispatchKeyGuard(include, exclude - exclude)
    with recording, torch.autocast(do.device.type, enabled=False), torch.enable_grad():
        leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
        gradients = torch.autograd.grad(run_strip(leaves, args), [*leaves.values()], (do, G))
    return dict(zip(leaves, gradients, strict=True))


def run_strip(x, args: Arguments):
    """The outputs `[L, B, H, V]` of a strip's tokens and the state behind them, from the state `S`.

    With `P_t = e^g_t S_{t-1}`, or `S_{t-1}`:

        diagonal: S_t = (1 - k_t^2 (x) eps_t) * P_t + k_t (x) (eps_t v_t)
        exact:    S_t = P_t + k_t (x) (eps_t (v_t - k_t^T P_t))
    """
    q, k, v, S = x['q'], x['k'], x['v'], x['S']
    beta, g = (y[..., None] if y is not None and y.dim() == 3 else y for y in (x['beta'], x.get('g')))
    eps = step_sizes(k, beta, args).expand_as(v)[..., None, :]
    k, decay = k[..., None], None if g is None else g.exp()[..., None, :]
    if not args.exact:
        kept, written = 1 - k.square() * eps, k * (eps * v[..., None, :])
        kept = kept if decay is None else kept * decay
    states = []
    for t in range(len(k)):
        if args.exact:
            P = S if decay is None else decay[t] * S
            S = torch.addcmul(P, k[t], eps[t] * (v[t][..., None, :] - k[t].mT @ P))
        else:
            S = torch.addcmul(written[t], kept[t], S)
        states.append(S)
    o = (q[..., None, :] @ torch.stack(states))[..., 0, :] * args.scale
    o = o + x['D'] * v if 'D' in x else o
    return o * F.silu(x['z']) if 'z' in x else o, S


def step_sizes(k, beta, args: Arguments):
    """`eps = c b / (1 + b |k|^2)`, `[L, B, H, V]`, or `[L, B, H, 1]` for one step size per head.

    PyTorch's derivative would be a difference that cancels for large keys. This one is `c f^2` by b, with
    `f = 1 / (1 + b |k|^2)`, and `-eps^2 / c` by `|k|^2`.
    """
    norm, c = k.square().sum(-1, keepdim=True), args.step_options.factor
    x, n = beta.detach(), norm.detach()
    b = x.sigmoid() if args.use_beta_sigmoid_in_kernel else x
    # NaN where the step size underflows, rather than a zero that looks valid
    f = 1 / (1 + b * n) + 0 * (4 * n)
    slope = c * f.square() * (b * (-x).sigmoid() if args.use_beta_sigmoid_in_kernel else 1)
    return c * b * f + slope * (beta - x) - c * (b * f).square() * (norm - n)


def view_states(states, args: Arguments):
    return states


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


def time_first_inputs(args: Arguments):
    """The inputs by name, and D in float32, those that are given."""
    tokens = {name: time_first(x) for name in PER_TOKEN if (x := getattr(args, name)) is not None}
    return tokens, {} if args.D is None else {'D': args.D.float()}


def time_first(x):
    """`[B, T, ...]` in any dtype as contiguous float32 `[T, B, ...]`."""
    return x.detach().float().transpose(0, 1).contiguous()


def batch_first(x, like):
    """`[T, B, ...]` as a contiguous `[B, T, ...]` in the dtype of `like`."""
    return x.transpose(0, 1).to(like.dtype).contiguous()
