"""The implementations of the operators: in Triton, in PyTorch; on the CPU also in loops of a package.

fla's `dispatch` breaks the graph of `torch.compile` at each call, so it has none of these.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Hashable
from functools import cache
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fla_longhorn.ops.arguments import Arguments, Gradients
from fla_longhorn.ops.pool import Pool


class Backend(Protocol):
    """A module with these functions, on checked arguments and without autograd."""

    __name__: str

    def longhorn_fwd(
        self, args: Arguments, *, save_states: bool, parallel: bool, final_state: Tensor | None = None,
        pool: Pool | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`o [B, T, H, V]`, the final state and `states [S, H, K, V]`, empty where they are not requested.

        `parallel` allows splitting sequences. The final state is written to `final_state`, which may be the initial one, or to
        the rows of `pool`. States are saved by the rules of `checkpoints.py`.
        """

    def longhorn_bwd(
        self, do: Tensor, dht: Tensor | None, states: Tensor, args: Arguments, *, parallel: bool,
    ) -> Gradients: ...

    def view_states(self, states: Tensor, args: Arguments) -> Tensor:
        """Saved states as `[S, H, K, V]`."""


class TokenLoops(Protocol):
    """A layer's decoded token between its first and its last projection, in one loop."""

    # of a layer's parameters and options, as `mix_tokens` takes them
    @property
    def Mixer(self) -> Any: ...

    def mix_layer(self, layer: Any, x: Tensor, z: Tensor, conv_state: Tensor, recurrent_state: Tensor) -> Tensor | None:
        """The input `[B, 1, d]` of a layer's last projection, given the halves of its first one's output.

        The states are updated in place. None, with nothing changed, where there is no loop for these tensors, or if a part of
        the layer is not as its constructor made it.
        """

    def mix_tokens(self, x: Tensor, z: Tensor, mixer: Any, memory: Tensor, pool: Pool) -> Tensor | None:
        """The same by a `mixer`; the convolution's inputs and the states are rows of pools, as in a serving engine."""


class Loops(Hashable, Protocol):
    """What a package brings for tensors on the CPU, where it makes fla's own functions run too.

    Its entry point returns it (`fla_longhorn.patches.parts.register_packages`).
    """

    def is_available(self) -> bool:
        """Whether they can be compiled: the operators then run in them by default."""

    def load_operators(self) -> Backend: ...

    def of_modules(self, *tensors: Tensor | None) -> ModuleType | None:
        """Those of modules, or None, for tensors of a plain call (:func:`fla_longhorn.ops.plain.is_plain`)."""

    def of_token(self) -> TokenLoops | None:
        """Those of a decoded token, where the operators run in loops too."""


# set while `patch(packages=True)` is applied and a package brings some
loops: Loops | None = None

# Numba's loops are a package's, for the CPU; PyTorch is for every device, Triton for accelerators, and for the CPU in its
# interpreter
BACKENDS = ('numba', 'torch', 'triton')


def select_backend(device: torch.device) -> Backend:
    """The implementation for tensors on `device`.

    `FLA_LONGHORN_BACKEND` (a name in :data:`BACKENDS`) selects one; if it cannot run there, this raises and never falls back.
    """
    asked = os.environ.get('FLA_LONGHORN_BACKEND')
    return load_backend(backend_name(device.type, asked, loops), loops)


@cache
def backend_name(device_type: str, asked: str | None, loops: Loops | None) -> str:
    # Triton reads it once too, when it meets the kernels
    interpreting = os.environ.get('TRITON_INTERPRET') == '1'
    if asked:
        check_name(asked, device_type, interpreting, loops)
        return asked
    if device_type != 'cpu' or interpreting:
        return 'triton'
    return 'torch' if loops is None or not loops.is_available() else 'numba'


def check_name(name: str, device_type: str, interpreting: bool, loops: Loops | None) -> None:
    """Raise unless the backend can run there."""
    if name not in BACKENDS:
        raise ValueError(f'FLA_LONGHORN_BACKEND must be one of {sorted(BACKENDS)}, got {name!r}')
    if name == 'triton' and device_type == 'cpu' and not interpreting:
        raise ValueError('FLA_LONGHORN_BACKEND=triton runs on a GPU, or on the CPU with TRITON_INTERPRET=1; q is on the CPU')
    if name == 'numba' and device_type != 'cpu':
        raise ValueError(f'FLA_LONGHORN_BACKEND=numba runs on the CPU; q is on {device_type}')
    if name == 'numba' and loops is None:
        raise ValueError('FLA_LONGHORN_BACKEND=numba needs fla-longhorn-cpu installed, and patch(packages=True)')


@cache
def load_backend(name: str, loops: Loops | None = None) -> Backend:
    if name == 'numba':
        return cast(Loops, loops).load_operators()
    return cast(Backend, importlib.import_module(f'{__package__}.{name}'))


def token_loops(x: Tensor) -> TokenLoops | None:
    """A package's for a decoded token `x`."""
    return None if loops is None or torch.compiler.is_compiling() or not x.is_cpu else loops.of_token()


def backend_of(args: Arguments) -> Backend:
    return select_backend(args.q.device)
