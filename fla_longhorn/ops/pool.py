"""A pool of states, and which of its rows belong to the sequences of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

PAD_SLOT_ID = -1


class Pool(NamedTuple):
    """States `[P, H, K, V]` and the arguments of :func:`fla_longhorn.ops.longhorn_state_update` that choose among them.

    The state before sequence n is row `state_indices[n]` (row n without it), or zero where `has_initial_state[n]` is false;
    the state after it goes to row `final_state_indices[n]` (without it, to the row of the state before). A negative index,
    and `pad_slot_id`, stand for no row.
    """

    states: Tensor
    state_indices: Tensor | None = None
    final_state_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    pad_slot_id: int = PAD_SLOT_ID

    @property
    def choices(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in ('state_indices', 'final_state_indices', 'has_initial_state')}

    @property
    def is_chosen_from(self) -> bool:
        """Whether the states are more, or in another order, than those of the sequences."""
        return not (self.state_indices is None and self.final_state_indices is None and self.has_initial_state is None)

    def contiguous(self) -> Pool:
        """The same states, with contiguous index tensors."""
        choices: dict[str, Any] = {name: None if x is None else x.contiguous() for name, x in self.choices.items()}
        return self._replace(**choices)

    def locate(self, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """Row indices to read and to write (int64 `[N]`, -1 = none), and a bool mask `[N]` of the sequences that take part.

        Sequences without a row are skipped: zero output, no reads, no writes.
        """
        if self.state_indices is None:
            first = torch.arange(N, dtype=torch.int64, device=self.states.device)
        else:
            first = self._rows(self.state_indices)
        last = first if self.final_state_indices is None else self._rows(self.final_state_indices)
        used = first >= 0
        last = torch.where(used, last, -1)
        if self.has_initial_state is not None:
            first = torch.where(self.has_initial_state, first, -1)
        return first, last, used

    def gather(self, N: int) -> Tensor:
        """The states before the sequences, `[N, ...]`; zero where there is none."""
        first, _, _ = self.locate(N)
        return torch.where((first >= 0).view(-1, 1, 1, 1), self.states[first.clamp_min(0)], 0)

    def scatter(self, states: Tensor) -> None:
        """Put the states after the sequences, `[N, ...]`, into their rows."""
        _, last, _ = self.locate(len(states))
        self.states[last[last >= 0]] = states[last >= 0]

    def without_absent(self, o: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The outputs `[B, T, ...]`, those of sequences without a row set to zero, in place."""
        rows, N = o[0] if cu_seqlens is not None else o, len(o) if cu_seqlens is None else len(cu_seqlens) - 1
        for n in (~self.locate(N)[2]).nonzero().flatten().tolist():
            (rows[n] if cu_seqlens is None else rows[cu_seqlens[n]:cu_seqlens[n + 1]]).zero_()
        return o

    def _rows(self, indices: Tensor) -> Tensor:
        indices = indices.long()
        return torch.where((indices < 0) | (indices == self.pad_slot_id), -1, indices)
