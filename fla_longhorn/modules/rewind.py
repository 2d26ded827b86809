"""A cache that can be reverted: to an earlier token while it records, and to a snapshot at any time.

A recurrent state cannot be cut back to fewer tokens. While the cache records, it keeps for each piece of tokens the states
before it and the inputs from which the layers recompute the states inside it. transformers' assisted generation uses this
through `activate_past_recording` and `crop`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from fla.models.cache_utils import FLALayer
from fla.models.utils import Cache

from fla_longhorn.modules import state_files
from fla_longhorn.modules.replay import Replay

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Piece:
    """The tokens of one call."""

    # the layer's cache before the call
    before: FLALayer
    # how many tokens the call has
    length: int
    # the arguments of each update by the call, with its Replay or None
    updates: list[tuple[dict[str, Any], Replay | None]] = field(default_factory=list)


class RewindableLayer(FLALayer):
    """fla's cache of one layer, with the pieces recorded since the last :meth:`crop`."""

    is_croppable = True

    def __init__(self, record_past: bool = False) -> None:
        super().__init__()
        self.record_past = record_past
        self.pieces: list[Piece] = []

    def __copy__(self) -> RewindableLayer:
        """Copies `state` and `pieces`, and shares the tensors in them."""
        again = type(self).__new__(type(self))
        again.__dict__.update(self.__dict__, state=copy(self.state), pieces=list(self.pieces))
        return again

    def update(self, *, offset: int = 1, replay: Replay | None = None, **states: Any) -> dict[str, Any]:
        if not self.record_past:
            self.pieces.clear()
        elif offset == 0 and self.pieces:
            # a second update for tokens that are already counted
            self.pieces[-1].updates.append((states, replay))
        else:
            before = copy(self)
            before.pieces = []
            attention = states.get('attn_state')
            length = attention[0].shape[1] if attention and attention[0] is not None else offset
            self.pieces.append(Piece(before, length, [(states, replay)]))
        return super().update(offset=offset, **states)

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` tokens, or remove `-max_length`; drops the recorded pieces.

        Raises:
            RuntimeError: the tokens to remove were not recorded, or not by every part of the layer.
        """
        length = max(0, self._seen_tokens + max_length) if max_length < 0 else min(max_length, self._seen_tokens)
        pieces, self.pieces = self.pieces, []
        while length < self._seen_tokens:
            if not pieces:
                self.pieces = pieces
                raise RuntimeError(
                    f'crop can only remove tokens that were recorded, to a length of {self._seen_tokens} here, got {length}: '
                    'call activate_past_recording() before these tokens are read, or keep a snapshot()'
                )
            piece = pieces.pop()
            read = self._seen_tokens - piece.length
            updates = [] if length <= read else [_first(length - read, *update) for update in piece.updates]
            record_past, device = self.record_past, getattr(self, 'device', 'cpu')
            self.__dict__.update(copy(piece.before).__dict__, record_past=record_past, device=device, pieces=[])
            for i, (states, replayed) in enumerate(updates):
                super().update(offset=0 if i else length - read, **states).update(replayed)

    def reset(self) -> None:
        super().reset()
        self.pieces.clear()


def _first(n: int, states: dict[str, Any], replay: Replay | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of an update for the first n tokens of its piece, and the states that it then sets."""
    if replay is not None:
        return {'cache_kwargs': states.get('cache_kwargs')}, replay(n)
    recurrent = [name for name, x in states.items() if name not in ('attn_state', 'cache_kwargs') and x is not None]
    if recurrent:
        raise NotImplementedError(
            f'crop into a piece of several tokens needs what led to its {", ".join(recurrent)}, which this layer does not '
            'record: read the tokens one by one, or keep a snapshot()'
        )
    if states.get('attn_state') is not None:
        states = {**states, 'attn_state': tuple(x[:, :n] for x in states['attn_state'])}
    return states, {}


class RewindableCache(Cache):
    """fla's cache, made of :class:`RewindableLayer`; the models make one if they get none.

    Examples::
        >>> cache = model(prompt, use_cache=True).past_key_values
        >>> here = cache.snapshot()
        >>> model(first, past_key_values=cache, use_cache=True)
        >>> cache.restore(here)
        >>> model(second, past_key_values=cache, use_cache=True)
    """

    layers: list[Any]

    def __init__(self, seen_tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(seen_tokens, **kwargs)
        self.record_past = False

    def update(self, *, layer_idx: int = 0, offset: int | None = 1, **kwargs: Any) -> dict[str, Any]:
        while len(self.layers) <= layer_idx:
            self.layers.append(RewindableLayer(self.record_past))
        return self.layers[layer_idx].update(offset=1 if offset is None else offset, **kwargs)

    def activate_past_recording(self) -> None:
        """Record the tokens of later calls, so that :meth:`crop` can remove them."""
        self.record_past = True
        for layer in self.layers:
            layer.record_past = True

    def records(self, layer_idx: int) -> bool:
        """Whether it records a layer's tokens."""
        return self.layers[layer_idx].record_past if len(self.layers) > layer_idx else self.record_past

    def crop(self, max_length: int) -> None:
        """Remove the last `-max_length` tokens, or keep the first `max_length`.

        While the cache records, 0 removes nothing, as in transformers from 5.20 on, which passes minus the number of tokens to
        remove. The recorded pieces are dropped: another `crop` cannot go back further.

        Raises:
            RuntimeError: some of the tokens were not recorded.
            NotImplementedError: the crop ends inside a piece, and a layer did not record its inputs.
        """
        # a tensor in transformers 5.17, which later calls would change in place
        max_length = int(max_length)
        if max_length == 0 and self.record_past:
            max_length = self.get_seq_length()
        # an error of one layer leaves all as they were
        cropped = [copy(layer) for layer in self.layers]
        for layer in cropped:
            layer.crop(max_length)
        self.layers = cropped

    def snapshot(self) -> RewindableCache:
        """A copy that later calls do not change, which is a cache itself."""
        again = copy(self)
        again.layers = [copy(layer) for layer in self.layers]
        for layer in again.layers:
            layer.state, layer.pieces = layer._map_state(torch.clone), []
        return again

    def restore(self, snapshot: RewindableCache) -> None:
        """Return to `snapshot`, which may be restored again."""
        self.layers = snapshot.snapshot().layers

    def save(self, path: str | os.PathLike, model: PreTrainedModel, weights: bool = False) -> None:
        """Write the states, in their dtypes, to a safetensors file from which :meth:`load` continues, bit for bit.

        Args:
            path (str or os.PathLike):
                The file. It is replaced when all is written.
            model (PreTrainedModel):
                The model that read the tokens. The file keeps a hash of its config.
            weights (bool, Optional):
                Whether to keep a hash of the base model's weights too, which takes a pass over them here and in `load`.
                Default: `False`.

        Examples::
            >>> cache = model(prompt, use_cache=True).past_key_values
            >>> cache.save('prompt.safetensors', model)
            >>> cache = RewindableCache.load('prompt.safetensors', model)
            >>> cache.batch_repeat_interleave(8)
            >>> model(questions, past_key_values=cache, use_cache=True)
        """
        state_files.save(self.layers, path, model, weights)

    @classmethod
    def load(cls, path: str | os.PathLike, model: PreTrainedModel) -> RewindableCache:
        """The cache that :meth:`save` wrote, on the model's device; rows can be selected, repeated and read on.

        Raises:
            ValueError: the file is truncated or edited, or another model wrote it.
            FileNotFoundError: there is no such file.
        """
        cache = cls()
        for tokens, state in state_files.load(path, model):
            layer = RewindableLayer()
            layer.state, layer._seen_tokens = state, tokens
            cache.layers.append(layer)
        return cache

    def detach(self) -> None:
        """Detach the states from their autograd graphs."""
        for layer in self.layers:
            layer.state, layer.pieces = layer._map_state(torch.Tensor.detach), []

    def _transform_states(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Reorder rows, for beam search; drops the pieces, whose rows are in the old order."""
        super()._transform_states(function)
        for layer in self.layers:
            layer.pieces.clear()
