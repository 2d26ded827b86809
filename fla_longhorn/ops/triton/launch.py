"""Launch parameters: a frozen record for each launch of a kernel, and the rules that make them.

A rule is a function of K, V, the precision of products and the card. All are in :data:`RULES`, and callers get records through
it only: it is the place to replace them. A file of timed parameters goes before the rules (:mod:`.tuned`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import TypeVar, cast

from triton.runtime.jit import KernelInterface

from fla_longhorn.ops.triton.device import Card
from fla_longhorn.ops.triton.tuned import tuned


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Triton's own launch options; a kernel's records add its tile sizes. None leaves an option to Triton."""

    num_warps: int = 1
    num_stages: int | None = None
    maxnreg: int | None = None

    def of(self, kernel: KernelInterface) -> dict[str, int]:
        """The launch's keyword arguments: the parameters that the kernel has, and Triton's own."""
        names = {*kernel.arg_names, *LaunchConfig.__dataclass_fields__}
        return {name: x for name, x in self.parameters().items() if name in names and x is not None}

    def parameters(self) -> dict[str, int]:
        return {x.name: getattr(self, x.name) for x in fields(self)}


Config = TypeVar('Config', bound=LaunchConfig)
# functions of K, V, the products' precision and the card, by the name of a kernel, and of its pass where it has several
RULES: dict[str, Callable[[int, int, str, Card], LaunchConfig]] = {}


def launch_rule(name: str) -> Callable[[Callable[[int, int, str, Card], Config]], Callable[[int, int, str, Card], Config]]:
    """Enter a rule in `RULES` under the name of its kernel; the function then asks there."""
    def enter(rule: Callable[[int, int, str, Card], Config]) -> Callable[[int, int, str, Card], Config]:
        RULES[name] = rule

        @wraps(rule)
        def choose(K: int, V: int, precision: str, card: Card) -> Config:
            return cast(Config, tuned(RULES[name](K, V, precision, card), name, K, V, precision, card))

        return choose

    return enter
