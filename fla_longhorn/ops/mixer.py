"""What a layer computes between its first and its last projection, for one token per sequence, in one call.

In decoding, calling a convolution, two small products and the recurrence takes several times as long as computing them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fla_longhorn.ops import operator
from fla_longhorn.ops.inputs import check_rows
from fla_longhorn.ops.pool import Pool


class Mixer(NamedTuple):
    """A layer of d channels in H heads, with K entries per channel and step sizes of rank R."""

    # the convolution's, `[d, 1, 4]` and `[d]`
    taps: Tensor
    conv_bias: Tensor | None
    # `[R + 2 H K, d]`, or `[R + H K, d]` if the queries are the keys
    x_weight: Tensor
    # `[d, R]` and `[d]`, or `[H, R]` and `[H]` for one step size per head
    beta_weight: Tensor
    beta_bias: Tensor
    # `[d]`
    D: Tensor
    num_heads: int
    state_size: int
    exact: bool
    allow_neg_eigval: bool
    # of the norm of the keys, or None without it
    key_eps: float | None
    # `down` `[R', d]`, `up` `[d, R']`, `A_log` `[H]` and `dt_bias` `[d]` of the layer's gate, or for one decay per head
    # `[H, R']` and `[H]`
    gate: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        return self[:6] + (self.gate or ())


def mix_tokens(x: Tensor, z: Tensor, mixer: Mixer, memory: Tensor, pool: Pool) -> Tensor | None:
    """The input of a layer's last projection, given the halves of the first one's output, for one token per sequence.

    Between the steps, whose equations :class:`fla_longhorn.layers.Longhorn` gives, numbers have the dtype of `x`. Tensors are
    not differentiated, traced or transformed (:func:`fla_longhorn.ops.arguments.is_plain`).

    Args:
        x, z (torch.Tensor): `[N, d]` or `[N, 1, d]`.
        mixer (Mixer): the layer's parameters and options.
        memory (torch.Tensor):
            The convolution's inputs before the tokens, the newest last: `[N, d, 4]`, or where `pool` names rows `[P, 3, d]`.
            Updated in place.
        pool (Pool): float32 states `[N, H, K, V]`, or with rows a pool `[P, H, K, V]`. Updated in place.

    Returns:
        A new tensor like `x`, or None, with nothing changed, if there is no such loop, or none for these tensors, or if there
        is so much work that several threads do it faster step by step.

    Raises:
        ValueError: a row is outside of the pool, or a sequence writes one that another reads or writes.
    """
    loops = None if operator.find_token_loops is None else operator.find_token_loops()
    if loops is None:
        return None
    if pool.is_chosen_from:
        if memory.shape[0] != pool.states.shape[0]:
            raise ValueError(
                f'memory and states must be pools of as many rows, got {memory.shape[0]} and {pool.states.shape[0]}'
            )
        check_rows(pool, x.shape[0])
    return loops.mix_tokens(x, z, mixer, memory, pool)
