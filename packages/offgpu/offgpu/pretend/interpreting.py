"""Fixes for Triton's interpreter where it raises an error for what the compiler accepts."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def patch() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = with_bool_mask(builder.create_masked_load, 1)
    builder.create_masked_store = with_bool_mask(builder.create_masked_store, 2)
    patch_lang = interpreter._patch_lang

    def patch_lang_and_range(function):
        function.__globals__.setdefault('range', count)
        return patch_lang(function)

    interpreter._patch_lang = patch_lang_and_range


def with_bool_mask(function: Callable, position: int) -> Callable:
    """Products of masks are integers, which the interpreter does not accept as masks."""
    def run(self, *args):
        mask = args[position]
        if mask.data.dtype != bool:
            mask = type(mask)(mask.data.astype(bool), mask.dtype)
        return function(self, *args[:position], mask, *args[position + 1:])

    return run


class LoopCounter(int):
    """An int that has a tensor's `to`, as a loop's counter has for the compiler; so have sums and products of it."""

    def to(self, dtype, *args, **kwargs):
        data = np.array([int(self)], interpreter._get_np_dtype(dtype))
        return core.tensor(interpreter.TensorHandle(data, dtype), dtype)


def keep_counter(name: str) -> Callable:
    function = getattr(int, name)

    def run(self, other):
        # a constexpr has its value; tensors know better
        other = getattr(other, 'value', other)
        result = function(int(self), int(other)) if isinstance(other, int) else NotImplemented
        return result if result is NotImplemented else LoopCounter(result)

    return run


for _name in ('add', 'radd', 'mul', 'rmul', 'sub', 'rsub', 'floordiv', 'mod'):
    setattr(LoopCounter, f'__{_name}__', keep_counter(f'__{_name}__'))


def count(*args: int) -> Sequence[LoopCounter]:
    # host code of the module also sees this `range`
    return tuple(map(LoopCounter, builtins.range(*args)))
