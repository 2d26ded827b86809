"""Values that backward computes again, in place of keeping them.

Inside :class:`Values`, autograd records as always. Where it saves a tensor that has the memory of a recomputed value, it keeps
how to compute that value, and computes it when backward asks for the tensor: nothing else differs, so PyTorch's rules hold for
whatever a layer is used for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fla_longhorn.modules.dispatch import has_values
from fla_longhorn.ops.plain import is_recorded

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Saved:
    """A tensor as autograd saves it: by the hooks of the caller, such as a checkpoint's, or as it is, to be left unchanged."""

    def __init__(self, x: Tensor, hooks: Hooks | None) -> None:
        self.hooks, self.version = hooks, x._version
        self.x: Any
        if hooks is None:
            self.x = x.detach()
        else:
            with torch.no_grad():
                self.x = hooks[0](x)

    def get(self) -> Tensor:
        if self.hooks is not None:
            return self.hooks[1](self.x)
        if self.x._version != self.version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of '
                f'shape {list(self.x.shape)} is at version {self.x._version}, expected version {self.version}'
            )
        return self.x


class Value:
    """A contiguous tensor as `function(*inputs)`, computed at its first use in backward and kept until the last."""

    def __init__(self, y: Tensor, function: Callable[..., Tensor], inputs: list[Saved | None]) -> None:
        self.version, self.function, self.inputs = y._version, function, inputs
        device = y.device.type
        self.autocast: Callable[[], AbstractContextManager] = nullcontext
        # not for meta tensors
        if torch.amp.is_autocast_available(device):
            dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
            self.autocast = partial(torch.autocast, device, dtype, enabled)
        self.y: Tensor | None = None
        # the uses, and those that are to come before it is dropped; wrong counts, of parts of a graph, only compute it again
        self.uses = self.left = 0

    def get(self) -> Tensor:
        y = self.y
        if y is None:
            inputs = [None if x is None else x.get() for x in self.inputs]
            with torch.no_grad(), self.autocast():
                y = self.function(*inputs).contiguous()
        self.left = (self.left or self.uses) - 1
        self.y = y if self.left else None
        return y


class Part:
    """What autograd saves of a value: the whole or a view."""

    def __init__(self, value: Value, x: Tensor) -> None:
        value.uses += 1
        self.value, self.place = value, (x.shape, x.stride(), x.storage_offset())

    def get(self) -> Tensor:
        y = self.value.get()
        shape, strides, offset = self.place
        return y.as_strided(shape, strides, y.storage_offset() + offset)


class Values:
    """A context in which backward recomputes the values passed to :meth:`add`."""

    def __init__(self) -> None:
        self.context = saved_tensors_hooks(self.pack, lambda x: x.get())
        # by their memory, which is not given to other tensors as long as it is a key
        self.places: dict[torch.UntypedStorage, Value] = {}

    def add(self, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor | None) -> None:
        """Recompute `y`, which has its memory to itself, as `function(*inputs)`, without autograd."""
        known = not any(x is not None and x.is_inference() for x in inputs)
        if known and y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes:
            saved = [None if x is None else Saved(x, self.hooks) for x in inputs]
            self.places[y.untyped_storage()] = Value(y, function, saved)

    def pack(self, x: Tensor) -> Saved | Part:
        value = self.places.get(x.untyped_storage())
        return Saved(x, self.hooks) if value is None or x._version != value.version else Part(value, x)

    def __enter__(self) -> Self:
        # private: PyTorch calls the innermost hooks alone, and nothing public tells of those around them
        self.hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)
        self.places.clear()


def keep_inputs(function: Callable[..., Any], x: Tensor, *inputs: Any) -> Any:
    """`function(x, *inputs)`, in place of a fused kernel: autograd keeps the inputs alone, as it does of the kernel.

    This is for tensors without memory, with which people estimate what a GPU needs; others are not computed again.
    """
    if has_values(x) or not is_recorded():
        return function(x, *inputs)
    return checkpoint(function, x, *inputs, use_reentrant=False, preserve_rng_state=False)
