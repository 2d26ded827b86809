"""The arguments of a Longhorn operator, passed from the public function to the backend as one value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

# outputs, the final state or None, and intermediate states if requested
Result = tuple[Any, ...]


class StepOptions(NamedTuple):
    """The flags of :class:`Arguments` that say what the step sizes are; backends pass them on as one value."""

    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool

    @property
    def factor(self) -> int:
        """c in eps = c beta / (1 + beta |k|^2), of which the derivative by |k|^2 is -eps^2 / c."""
        return 2 if self.allow_neg_eigval else 1


class Arguments(NamedTuple):
    """The arguments of :func:`fla_longhorn.ops.chunk_longhorn` that a backend needs, in its order.

    Checks, the operators' schema and context parallelism follow the fields, so an option is one more field. Tensors are the
    fields annotated so; those of :class:`Gradients` have a gradient.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    scale: float = 1.0
    initial_state: Tensor | None = None
    output_final_state: bool = False
    exact: bool = False
    D: Tensor | None = None
    z: Tensor | None = None
    use_beta_sigmoid_in_kernel: bool = False
    state_v_first: bool = False
    cu_seqlens: Tensor | None = None
    allow_neg_eigval: bool = False
    g: Tensor | None = None
    disable_recompute: bool = False

    @property
    def step_options(self) -> StepOptions:
        return StepOptions(self.use_beta_sigmoid_in_kernel, self.allow_neg_eigval)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """`B, T, H, K, V`: rows, tokens, heads, entries of a key, channels per head."""
        B, T, H, K = self.q.shape
        return B, T, H, K, self.v.shape[-1]

    @property
    def num_sequences(self) -> int:
        """N: the number of rows, or of sequences that `cu_seqlens` packs into one row."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of the initial and final states."""
        _, _, H, K, V = self.sizes
        return (self.num_sequences, H, V, K) if self.state_v_first else (self.num_sequences, H, K, V)

    @property
    def differentiable(self) -> list[Tensor | None]:
        """The tensors that have a gradient, in the order of :class:`Gradients`."""
        return [getattr(self, name) for name in DIFFERENTIABLE]

    def without(self, names: Iterable[str]) -> Arguments:
        """A copy with `None` in place of these tensors."""
        absent: dict[str, Any] = dict.fromkeys(names)
        return self._replace(**absent)


class Gradients(NamedTuple):
    """The gradients of the operator's tensors, each like its input; `None` where the input is absent."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    D: Tensor | None = None
    z: Tensor | None = None
    g: Tensor | None = None


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """A result, or an empty float32 tensor for one that was not requested."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x


TYPES = get_type_hints(Arguments)
TENSORS = tuple(name for name, kind in TYPES.items() if kind in (Tensor, Tensor | None))
FLAGS = tuple(name for name, kind in TYPES.items() if kind is bool)
DIFFERENTIABLE = Gradients._fields
_PLACES = tuple(Arguments._fields.index(name) for name in TENSORS)


def get_tensors(args: Arguments) -> list[Any]:
    """Those of :data:`TENSORS`."""
    return [args[i] for i in _PLACES]
