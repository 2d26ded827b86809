"""A call of the layer apart from the model: padding, the states before it, a rank's part of the layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from fla.layers.utils import get_layer_cache, update_layer_cache

from fla_longhorn.modules.rows import WHOLE, Rows
from fla_longhorn.modules.states import read_states
from fla_longhorn.modules.tensor_parallel import find_part
from fla_longhorn.modules.varlen import check_keywords, find_rows

if TYPE_CHECKING:
    from fla.models.utils import Cache

    from fla_longhorn.layers.longhorn import Longhorn


class LayerCall:
    """One call of a layer on `[B, T, hidden_size]`.

    `rows` says how B rows hold their tokens, `part` which heads a rank has (`None`: all of them). `recurrent_state` and
    `conv_state` are those before the call, `None` without a filled cache.
    """

    cp_context: Any = None
    cu_seqlens_cpu: torch.Tensor | None = None
    cache: Cache | None = None

    def __init__(
        self, layer: Longhorn, T: int, rows: Rows, states: tuple[torch.Tensor | None, ...] = (None, None),
        use_cache: bool = True,
    ) -> None:
        self.layer, self.T, self.rows, self.part, self.use_cache = layer, T, rows, find_part(layer), use_cache
        self.num_heads = layer.num_heads if self.part is None else self.part.num_heads
        self.recurrent_state, self.conv_state = states

    @property
    def is_step(self) -> bool:
        """One token per row, whole and alone, whose states are kept."""
        return self.T == 1 and self.use_cache and type(self.rows) is Rows and self.part is self.cp_context is None

    def project(self, in_proj: nn.Linear, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's channels of x and z, `[B, T, D]` without the padding."""
        both = in_proj(self.rows.enter(hidden_states))
        return both.chunk(2, dim=-1) if self.part is None else self.part.exchange(both)

    def by_heads(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's channels `[B, T, D]` as `[B, T, H, D / H]`."""
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1)

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's heads of `x` `[B, T, H, ...]` of all heads."""
        return x if self.part is None else self.part.of_heads(x)

    def all_channels(self, x: torch.Tensor) -> torch.Tensor:
        """All channels, from this rank's `x` `[B, T, D]`."""
        return x if self.part is None else self.part.gather(x)

    def own_channels(self, D: Any) -> torch.Tensor:
        """This rank's channels of a parameter `[d]`, by heads."""
        return (D if self.part is None else D.to_local()).view(self.num_heads, -1)

    def store(self, recurrent_state: torch.Tensor | None, conv_state: torch.Tensor | None) -> None:
        """Put the states after the call into the cache."""
        if self.use_cache:
            update_layer_cache(
                self.layer, self.cache, recurrent_state=recurrent_state, conv_state=conv_state, offset=self.T,
            )


def begin(
    layer: Longhorn, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, cache: Cache | None, use_cache: bool,
    rows: Rows | None, kwargs: dict[str, Any],
) -> LayerCall:
    """Check the arguments of :meth:`fla_longhorn.layers.Longhorn.forward`."""
    B, T, _ = hidden_states.shape
    if not (torch.compiler.is_compiling() or hidden_states.numel()):
        raise ValueError(
            f'hidden_states must have the shape [B, T, {layer.hidden_size}] with at least one row and one token, '
            f'got {list(hidden_states.shape)}'
        )
    check_keywords(f'{type(layer).__name__}.forward', kwargs, layer.ignored_keywords)
    state = get_layer_cache(layer, cache)
    if rows is None:
        rows, kwargs = find_rows(kwargs, B, T, hidden_states.device, attention_mask, filled=state is not None)
    else:
        rows = rows.to(hidden_states.device)
    call = LayerCall(layer, T, rows or WHOLE, use_cache=use_cache)
    call.cache, call.cp_context = cache, kwargs.get('cp_context')
    call.cu_seqlens_cpu = kwargs.get('cu_seqlens_cpu') if rows is None else rows.cu_seqlens_cpu
    call.recurrent_state, call.conv_state = read_states(layer, state, call.rows.count(B), call.part)
    if call.cp_context is not None and (attention_mask is not None or use_cache or call.recurrent_state is not None):
        raise ValueError('cp_context takes packed sequences from their start, so attention_mask must be None, and '
                         'use_cache False: pass it in the call, or call model.train()')
    return call
