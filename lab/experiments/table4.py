"""The paper's Table 4 (arXiv 2407.14207): objectives, updates, and the field's code for them, one step each.

A `Row` is a line of the table. `printed` is the objective as the paper prints it, `objective` the one that the update
minimises. They differ where the paper has a misprint, and for Longhorn, whose printed update approximates. `update` is the
formula in float64; `op` runs fla's naive ops and transformers' RG-LRU, which compute in float32, and this package's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.hgrn.naive import naive_recurrent_hgrn
from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
from fla.ops.simple_gla.naive import naive_recurrent_simple_gla
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from fla_longhorn.ops import naive_recurrent_longhorn


@dataclass(frozen=True)
class Token:
    """The inputs of a step, float64: a key and an input in the paper's letters, and each model's gates, in (0, 1)."""
    k: torch.Tensor      # [K]
    x: torch.Tensor      # [V]
    beta: torch.Tensor   # [V]  Longhorn's step sizes
    gamma: torch.Tensor  # []   RetNet's decay
    alpha: torch.Tensor  # [K]  GLA's decay
    a: torch.Tensor      # [V]  Griffin's decay, the table's alpha_t
    i: torch.Tensor      # [V]  Griffin's input gate

    @property
    def eps(self) -> torch.Tensor:
        """The table's delta_t of Longhorn, `[V]`."""
        return self.beta / (1 + self.beta * self.k.dot(self.k))


def square(x: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    """The squared norm, with a weight for each entry."""
    return (weight * x.square()).sum()


# Objectives of the state S [K, V] after P = S_{t-1}; Griffin's state is a vector, [1, V].
def la(S, P, t):
    return square(S - P) - 2 * (S.mT @ t.k).dot(t.x)


def retnet(S, P, t):
    return t.gamma * square(S - P) + (1 - t.gamma) * square(S) - 2 * (S.mT @ t.k).dot(t.x)


def gla_printed(S, P, t):
    """With the printed sign of the inner product."""
    return square(S - t.alpha[:, None] * P) + 2 * (S.mT @ t.k).dot(t.x)


def gla(S, P, t):
    return square(S - t.alpha[:, None] * P) - 2 * (S.mT @ t.k).dot(t.x)


def griffin(S, P, t):
    """The last term is printed without its sum, as a vector."""
    return square(S - P, t.a) + square(S, 1 - t.a) - 2 * (S * (1 - t.a).sqrt() * t.i * t.x).sum()


def longhorn(S, P, t):
    return square(S - P) + square(S.mT @ t.k - t.x, t.beta)


def longhorn_entries(S, P, t):
    """The objective of the diagonal update: each entry recalls the input by itself."""
    erased = torch.outer(t.k.square(), t.eps)
    return square(S - P, 1 - erased) + square(t.k[:, None] * S - t.x, t.eps)


# Other readings of the table, and other papers' versions of it.
def griffin_roots(S, P, t):
    """The roots as the weights of the squared norms, not inside of them."""
    return square(S - P, t.a.sqrt()) + square(S, (1 - t.a).sqrt()) - 2 * (S * (1 - t.a).sqrt() * t.i * t.x).sum()


def griffin_bare(S, P, t):
    """Without the factor in the last term."""
    return square(S - P, t.a) + square(S, 1 - t.a) - 2 * (S * t.i * t.x).sum()


def griffin_published(S, P, t):
    """With the factor that Griffin has in its own paper (arXiv 2402.19427) and in transformers."""
    return square(S - P, t.a) + square(S, 1 - t.a) - 2 * (S * (1 - t.a.square()).sqrt() * t.i * t.x).sum()


def longhorn_minus(S, P, t):
    """As Gated DeltaNet's Table 1 (arXiv 2412.06464) prints it, with a minus before the loss."""
    return square(S - P) - square(S.mT @ t.k - t.x, t.beta)


def minimiser(objective: Callable, P: torch.Tensor, token: Token) -> torch.Tensor:
    """The minimiser of a quadratic objective, of P's shape, by one Newton step with autograd's gradient and Hessian.

    Does not use the updates. Raises `torch.linalg.LinAlgError` if the Hessian is not positive definite.
    """
    def loss(s: torch.Tensor) -> torch.Tensor:
        return objective(s.view_as(P), P, token)

    start = torch.zeros(P.numel(), dtype=P.dtype)
    factor = torch.linalg.cholesky(torch.func.hessian(loss)(start))
    return -torch.cholesky_solve(torch.func.grad(loss)(start)[:, None], factor).view_as(P)


# One step of the field's code from a state, as a sequence of one token.
def one(x: torch.Tensor) -> torch.Tensor:
    """`[...]` to `[B, T, H, ...]` of size 1 each."""
    return x[None, None, None]


def op_la(P, t):
    k, v = one(t.k), one(t.x)
    return naive_recurrent_linear_attn(k, k, v, initial_state=P.float()[None, None], output_final_state=True)[1][0, 0]


def op_retnet(P, t):
    k, v, g = one(t.k), one(t.x), t.gamma.log().view(1, 1, 1)
    return naive_recurrent_simple_gla(k, k, v, g, initial_state=P[None, None])[1][0, 0]


def op_gla(P, t):
    k, v, gk = one(t.k), one(t.x), one(t.alpha.log())
    return naive_recurrent_gla(k, k, v, gk, initial_state=P[None, None], output_final_state=True)[1][0, 0]


def op_griffin(P, t):
    x, g = ((1 - t.a).sqrt() * t.i * t.x)[None, None], t.a.log()[None, None]
    return naive_recurrent_hgrn(x, g, initial_state=P, output_final_state=True)[1]


def op_rglru(P, t):
    """RecurrentGemma's layer, with gates that ignore its input and equal `t.a` and `t.i`."""
    layer = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=t.x.numel(), num_attention_heads=1)).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.input_gate_bias.copy_(t.i.logit()[None])
        # a = exp(-8 sigmoid(0) softplus(parameter))
        layer.recurrent_param.copy_(torch.expm1(-t.a.log() / 4).log())
        layer.recurrent_states = P
        return layer(t.x[None, None], torch.ones(1, 1, dtype=torch.long))[0]


def op_longhorn(P, t, exact=False):
    k, v, beta = one(t.k), one(t.x), one(t.beta)
    return naive_recurrent_longhorn(
        k, k, v, beta, exact=exact, initial_state=P[None, None], output_final_state=True,
    )[1][0, 0]


@dataclass(frozen=True)
class Row:
    """A line of the table: the state S_t from P = S_{t-1} and a token."""
    name: str
    objective: Callable
    update: Callable
    op_name: str
    op: Callable
    # None: no line of the paper's, or what it prints is not a number
    printed: Callable | None = None


def update_griffin(P, t):
    return t.a * P + (1 - t.a).sqrt() * t.i * t.x


def update_exact(P, t):
    return P - torch.outer(t.k, t.eps * (P.mT @ t.k)) + torch.outer(t.k, t.eps * t.x)


def update_diagonal(P, t):
    return (1 - torch.outer(t.k.square(), t.eps)) * P + torch.outer(t.k, t.eps * t.x)


def update_published(P, t):
    return t.a * P + (1 - t.a.square()).sqrt() * t.i * t.x


TABLE = (
    Row('LA', la, lambda P, t: P + torch.outer(t.k, t.x), 'fla `naive_recurrent_linear_attn`', op_la, la),
    Row('RetNet', retnet, lambda P, t: t.gamma * P + torch.outer(t.k, t.x), 'fla `naive_recurrent_simple_gla`', op_retnet,
        retnet),
    Row('GLA', gla, lambda P, t: t.alpha[:, None] * P + torch.outer(t.k, t.x), 'fla `naive_recurrent_gla`', op_gla,
        gla_printed),
    Row('Griffin', griffin, update_griffin, 'fla `naive_recurrent_hgrn`', op_griffin),
    Row('Longhorn, Theorem 3.1', longhorn, update_exact, '`naive_recurrent_longhorn`, exact',
        lambda P, t: op_longhorn(P, t, exact=True), longhorn),
    Row('Longhorn, diagonal', longhorn_entries, update_diagonal, '`naive_recurrent_longhorn`', op_longhorn, longhorn),
)
VARIANTS = (
    Row("Griffin's own update, the table's objective", griffin, update_published, 'transformers `RecurrentGemmaRglru`',
        op_rglru),
    Row("Griffin's own update, the factor √(1 - α²) in the objective too", griffin_published, update_published,
        'transformers `RecurrentGemmaRglru`', op_rglru),
    Row("the table's Griffin, roots as weights of the norms", griffin_roots, update_griffin, 'fla `naive_recurrent_hgrn`',
        op_griffin),
    Row("the table's Griffin, no factor in the objective", griffin_bare, update_griffin, 'fla `naive_recurrent_hgrn`',
        op_griffin),
    Row('Theorem 3.1, a minus before the loss', longhorn_minus, update_exact, '`naive_recurrent_longhorn`, exact',
        lambda P, t: op_longhorn(P, t, exact=True)),
)
