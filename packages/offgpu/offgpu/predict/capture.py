"""The launches of a call, taken from the wrappers that make them: code, arguments, grid.

The call runs on meta tensors with the driver of :mod:`offgpu.launches`, which compiles each kernel for what it
is really given, as on the GPU. It runs again for twice or half the tokens, without compiling: what of a launch changes with
the length tells how its work grows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offgpu.launches import Choose, Launch, rehearsal, spread

# takes a number of tokens, makes what the pass takes, and returns the pass
Pass = Callable[[int], Callable[[], object]]
# only a GPU can choose among an autotuned kernel's configurations: two are compiled, and the best counts
CANDIDATES = spread(2)


class Operators(TorchDispatchMode):
    """Keeps PyTorch's own kernels: the bytes of what each reads and writes."""

    ALLOCATING = ('empty', 'empty_like', 'empty_strided', 'new_empty', '_unsafe_view')
    # their result alone, not what it is shaped like or what was there before
    FILLING = ('zero_', 'fill_', 'zeros', 'zeros_like', 'ones', 'ones_like', 'new_zeros')

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace == 'aten' and not function.is_view and name not in self.ALLOCATING:
            moved = (out,) if name in self.FILLING else args if name == 'copy_' else (args, kwargs, out)
            tensors = [x for x in tree_leaves(moved) if isinstance(x, torch.Tensor)]
            nbytes = sum(x.numel() * x.itemsize for x in tensors)
            if nbytes:
                self.launches.append(Launch(f'torch.{name}', nbytes=nbytes))
        return out


def take(call: Pass, T: int, target: str, depth: str, choose: Choose = CANDIDATES) -> list[Launch]:
    """The launches of the pass that `call(T)` returns; those that make what it takes are not compiled, and not kept."""
    with rehearsal(target, 'launch', spread(1)):
        run = call(T)
    with rehearsal(target, depth, choose) as launches, Operators(launches):
        run()
        return list(launches)


def capture(call: Pass, T: int, target: str, depth: str = 'code', choose: Choose = CANDIDATES) -> list[Launch]:
    """The launches of a pass over T tokens, each with that over `2 * T` or `T // 2` tokens.

    The second where twice the tokens take other kernels, as wrappers cut sequences in time from some length on.

    Raises:
        RuntimeError: neither launches the same kernels, so that nothing can be said of how they grow.
    """
    launches = take(call, T, target, depth, choose)
    names = [x.kernel for x in launches]
    # compiling found out which configurations do not fit
    fitting = {(x.kernel, x.configuration) for x in launches}
    for length in (2 * T, T // 2):
        others = take(call, length, target, 'launch', choose) if length else []
        others = [x for x in others if (x.kernel, x.configuration) in fitting]
        if [x.kernel for x in others] == names:
            for x, y in zip(launches, others, strict=True):
                x.other = y
            return launches
    raise RuntimeError(f'other kernels for {T} tokens than for twice or half as many: {names}')
