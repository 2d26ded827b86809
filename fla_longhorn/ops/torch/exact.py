"""The exact update (arXiv 2407.14207, Theorem 3.1) on a strip of tokens in PyTorch: matrix products and a substitution.

With the strip's keys and queries `K, Q [L, K]`, values, step sizes and residuals `V, E, R [L, V]`, its initial state `S`,
`G = strict_tril(K K^T)` and `A = tril(Q K^T)`:

    R = V - K S - G (E * R),    U = E * R,    Y = Q S + A U,    S <- S + K^T U

float32 with time first: q, k `[L, B, H, K]`, v, eps `[L, B, H, V]`, S `[B, H, K, V]`.
"""

from __future__ import annotations


def strip_forward(q, k, v, eps, S):
    """`y_t = q_t^T S_t` of L tokens from the initial state `S`, and the final state."""
    U = eps * residuals(k, v, eps, S)
    return outputs(q, k, U, S), add_strip(k, U, S)


def strip_end(k, v, eps, S):
    """The final state of the strip."""
    return add_strip(k, eps * residuals(k, v, eps, S), S)


def strip_backward(q, k, v, eps, dy, S, dS):
    """Return `(dq, dk, du, deps, y)` and the gradient of the initial state `S`; `dS` is that of the final state.

    With `X = dL/dU`: `X = A^T dY + K dS`, then `X[:s] -= G[s, :s]^T (E[s] X[s])` from the last s down; `W = E * X`,
    `du = X`, `deps = X * R`, `dA = tril(dY U^T)`, `dG = -strict_tril(W U^T)`, `dQ = dY S^T + dA K` and
    `dK = dA^T Q + U dS^T - W S^T + dG K + dG^T K` (without the part through eps). The gradient of `S` is
    `dS + Q^T dY - K^T W`.
    """
    R = residuals(k, v, eps, S)
    U = eps * R
    y = outputs(q, k, U, S)
    Q, K, dY, U_b = (head_first(x) for x in (q, k, dy, U))
    X = time_first((Q @ K.mT).tril().mT @ dY + K @ dS)
    G = gram(k)
    for s in range(len(k) - 1, 0, -1):
        X[:s].addcmul_(G[s, :s, ..., None], eps[s] * X[s], value=-1)
    W = head_first(eps * X)
    dA, dG = (dY @ U_b.mT).tril(), -(W @ U_b.mT).tril(-1)
    dQ = dY @ S.mT + dA @ K
    dK = dA.mT @ Q + U_b @ dS.mT - W @ S.mT + (dG + dG.mT) @ K
    return (time_first(dQ), time_first(dK), X, X * R, y), dS + Q.mT @ dY - K.mT @ W


def residuals(k, v, eps, S):
    """`r_t = v_t - k_t^T S_{t-1}` of each token, `[L, B, H, V]`, by forward substitution."""
    R = v - time_first(head_first(k) @ S)
    G = gram(k)
    for s in range(len(k) - 1):
        R[s + 1:].addcmul_(G[s, s + 1:, ..., None], eps[s] * R[s], value=-1)
    return R


def outputs(q, k, U, S):
    Q, K = head_first(q), head_first(k)
    return time_first(Q @ S + (Q @ K.mT).tril() @ head_first(U))


def add_strip(k, U, S):
    return S + head_first(k).mT @ head_first(U)


def gram(k):
    """`K K^T` as `[L, L, B, H]`."""
    K = head_first(k)
    return (K @ K.mT).permute(2, 3, 0, 1)


def head_first(x):
    """`[L, B, H, *]` as `[B, H, L, *]`."""
    return x.permute(1, 2, 0, 3)


def time_first(x):
    """`[B, H, L, *]` as a contiguous `[L, B, H, *]`."""
    return x.permute(2, 0, 1, 3).contiguous()
