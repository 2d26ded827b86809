"""A pool of states, and the rows of it that a call's sequences use."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

PAD_SLOT_ID = -1


class Pool(NamedTuple):
    """States `[P, H, K, V]` and the arguments of :func:`fla_longhorn.ops.longhorn_state_update` that select rows of them.

    The initial state of sequence n is row `state_indices[n]` (default: n), or zero where `has_initial_state[n]` is false.
    Its final state goes to row `final_state_indices[n]` (default: the same row). A negative index or `pad_slot_id` is no row.
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
        """Whether any of the choices is given; else row n is the state of sequence n."""
        return not (self.state_indices is None and self.final_state_indices is None and self.has_initial_state is None)

    def contiguous(self) -> Pool:
        choices: dict[str, Any] = {name: None if x is None else x.contiguous() for name, x in self.choices.items()}
        return self._replace(**choices)

    def locate(self, N: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows to read and to write (int64 `[N]`, -1: none), and a bool mask `[N]` of the sequences that have a row.

        The others are skipped: their output is zero, nothing is read or written.
        """
        if self.state_indices is None:
            first = torch.arange(N, dtype=torch.int64, device=self.states.device)
        else:
            first = self._rows(self.state_indices)
        last, used = first, first >= 0
        if self.final_state_indices is not None:
            last = torch.where(used, self._rows(self.final_state_indices), -1)
        if self.has_initial_state is not None:
            first = torch.where(self.has_initial_state, first, -1)
        return first, last, used

    def read(self) -> tuple[tuple | None, ...]:
        """The values of the choices. What follows from them is kept by value: layers share rows, whose memory may change."""
        _, named, final, filled, _ = self
        return (
            None if named is None else tuple(named.tolist()), None if final is None else tuple(final.tolist()),
            None if filled is None else tuple(filled.tolist()),
        )

    def gather(self, N: int) -> Tensor:
        """Initial states `[N, ...]` of the sequences; zero where there is none."""
        first = self.locate(N)[0]
        return torch.where((first >= 0).view(-1, 1, 1, 1), self.states[first.clamp_min(0)], 0)

    def scatter(self, states: Tensor) -> None:
        """Write the sequences' final states `[N, ...]` to their rows."""
        last = self.locate(len(states))[1]
        self.states[last[last >= 0]] = states[last >= 0]

    def without_absent(self, o: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Set the outputs `[B, T, ...]` of sequences without a row to zero, in place, and return all."""
        rows, N = o[0] if cu_seqlens is not None else o, len(o) if cu_seqlens is None else len(cu_seqlens) - 1
        for n in (~self.locate(N)[2]).nonzero().flatten().tolist():
            (rows[n] if cu_seqlens is None else rows[cu_seqlens[n]:cu_seqlens[n + 1]]).zero_()
        return o

    def _rows(self, indices: Tensor) -> Tensor:
        indices = indices.long()
        return torch.where((indices < 0) | (indices == self.pad_slot_id), -1, indices)


def list_rows(
    N: int, pad_slot_id: int, named: tuple | None, final: tuple | None, filled: tuple | None,
) -> tuple[tuple[int, int, bool], ...]:
    """:meth:`Pool.locate` of each sequence in Python's integers, from the values of the choices (:meth:`Pool.read`)."""
    def rows(indices: tuple) -> list[int]:
        return [-1 if row < 0 or row == pad_slot_id else row for row in indices]

    used = list(range(N)) if named is None else rows(named)
    first, last = used, used
    if final is not None:
        last = [after if row >= 0 else -1 for row, after in zip(used, rows(final), strict=True)]
    if filled is not None:
        first = [row if some else -1 for row, some in zip(used, filled, strict=True)]
    return tuple((before, after, row >= 0) for before, after, row in zip(first, last, used, strict=True))
