"""fla's attention, which also reads on behind a cache where rows have padding."""

from __future__ import annotations

from typing import Any

import torch
from fla.layers.attn import Attention
from fla.models.cache_utils import FLACache


class RowwiseAttention(Attention):
    """:class:`fla.layers.attn.Attention` with padding anywhere in the rows, and behind a cache.

    fla refuses several tokens with a cache and a mask at once. Beside a cache it counts positions from the end of a row, so
    that tokens before other padding than on the left lose their keys. Here such rows are taken one by one, without padding.
    An attention layer becomes one of these by its `__class__`.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """As fla's; `attention_mask` `[B, tokens in the cache + T]`."""
        T, cache, mask = hidden_states.shape[1], past_key_values, attention_mask
        if mask is not None and T > 1 and not torch.compiler.is_compiling():
            kept = mask != 0
            seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
            if kept.all():
                mask = None if seen else mask
            elif seen or has_gaps(kept, at_the_end=cache is not None):
                if cache is not None:
                    self._check_window(kept[:, :-T] if seen else kept)
                return self._by_rows(hidden_states, kept, seen, cache, **kwargs), None, cache
        return super().forward(hidden_states, mask, cache, output_attentions, use_cache, **kwargs)

    def _check_window(self, kept: torch.Tensor) -> None:
        """Refuse padding between tokens where the columns that a window keeps lack tokens that it sees."""
        if self.window_size is None:
            return
        known = kept[:, -self.window_size:].sum(1)
        if (known < kept.sum(1).clamp_max(self.window_size - 1)).any():
            raise ValueError(
                'attention_mask must not have padding behind tokens among the last '
                f'window_size = {self.window_size} columns before a call, which layer {self.layer_idx} keeps, got some'
            )

    def _by_rows(self, hidden_states: torch.Tensor, kept: torch.Tensor, seen: int, cache: Any, **kwargs: Any) -> torch.Tensor:
        B, T, _ = hidden_states.shape
        window = {'window_size': self.window_size}
        output = torch.zeros_like(hidden_states)
        new = [hidden_states.new_zeros(B, T, self.kv_dim) for _ in range(2)]
        past = cache[self.layer_idx]['attn_state'] if seen else new
        before, own = kept[:, :kept.shape[1] - T], kept[:, -T:]
        # a window keeps the last columns only
        known = before[:, -past[0].shape[1]:]
        for i in range(B):
            columns = own[i].nonzero().flatten()
            if not len(columns):
                continue
            row = FLACache()
            if before[i].any():
                state = tuple(x[i:i + 1, known[i]] for x in past)
                row.update(attn_state=state, layer_idx=self.layer_idx, cache_kwargs=window)
                # the position of the next token
                row.layers[self.layer_idx]._seen_tokens = int(before[i].sum())
            output[i, columns] = super().forward(hidden_states[i:i + 1, columns], None, row, use_cache=True, **kwargs)[0][0]
            states = row[self.layer_idx]['attn_state']
            stored = columns[-states[0].shape[1]:]
            for j, state in enumerate(states):
                new[j] = new[j].to(state.dtype)
                new[j][i, stored] = state[0, state.shape[1] - len(stored):]
        if cache is not None:
            cache.update(attn_state=tuple(new), layer_idx=self.layer_idx, offset=T, cache_kwargs=window)
        return output


def has_gaps(kept: torch.Tensor, at_the_end: bool) -> bool:
    """Whether a row has padding between tokens, or behind them too."""
    if at_the_end:
        return bool((kept[:, 1:] < kept[:, :-1]).any())
    return bool(((kept[:, 1:] > kept[:, :-1]) & (kept.cumsum(1)[:, :-1] > 0)).any())
