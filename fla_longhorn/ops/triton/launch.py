"""Launch parameters: what they depend on, and a frozen record for each launch of a kernel.

The rules, functions of a :class:`LaunchKey`, are in `diagonal/common.py` and `exact/configs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from triton.runtime.jit import KernelInterface

from fla_longhorn.ops.triton.device import Card


class LaunchKey(NamedTuple):
    """What launch parameters depend on. `precision` is how products round their operands: `bf16`, `tf32` or `ieee`."""

    K: int
    V: int
    precision: str
    card: Card


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Triton's own launch options; a kernel's records add its tile sizes. None leaves an option to Triton."""

    num_warps: int = 1
    num_stages: int | None = None
    maxnreg: int | None = None

    def of(self, kernel: KernelInterface) -> dict[str, int]:
        """The launch's keyword arguments: the parameters that the kernel has, and Triton's own."""
        return options_of(self, kernel)


@cache
def options_of(config: LaunchConfig, kernel: KernelInterface) -> dict[str, int]:
    names = *kernel.arg_names, *LaunchConfig.__dataclass_fields__
    return {name: x for name in names if (x := getattr(config, name, None)) is not None}
