"""Applying parts and reverting them. Nothing here starts a kernel or touches a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fla_cpu.changes import Changes
from fla_longhorn.patches.parts import PARTS

# chooses parts for programs that nobody edits: their names, separated by commas, or `none`
VARIABLE = 'FLA_LONGHORN_PATCH'
# `flash_attn` changes what native models of fla do
DEFAULT = tuple(name for name in PARTS if name != 'flash_attn')

# what is applied, in that order
_applied: dict[str, Changes] = {}


def register() -> None:
    """Apply the parts that `FLA_LONGHORN_PATCH` names, without it those of :data:`DEFAULT`; importing the package does.

    Raises:
        ValueError: the variable names a part that there is not.
    """
    patch(**dict.fromkeys(asked(os.environ.get(VARIABLE)), True))


def asked(value: str | None) -> tuple[str, ...]:
    names = DEFAULT if not value else () if value.strip() == 'none' else tuple(x.strip() for x in value.split(','))
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f'{VARIABLE} must name parts of {", ".join(PARTS)}, separated by commas, or be none, got {unknown}')
    return names


def patch(**parts: bool) -> None:
    """Apply the parts that are true and revert those that are false; others stay as they are.

    Args:
        parts (bool):
            `names`, `attn_mode`, `cpu`, `trainer`, `served` and `flash_attn`, by keyword: what each changes, and why, is
            in `docs/patches.md`.

    Raises:
        ValueError: there is no such part.
        RuntimeError: what a part to revert had set was replaced by others since; nothing is reverted then.

    Examples::
        >>> fla_longhorn.patch(cpu=False, flash_attn=True)
    """
    if unknown := [name for name in parts if name not in PARTS]:
        raise ValueError(f'patch takes {", ".join(PARTS)}, got {", ".join(unknown)}')
    revert(name for name, wanted in parts.items() if not wanted)
    new = [name for name in PARTS if parts.get(name) and name not in _applied]
    try:
        for name in new:
            _applied[name] = Changes()
            PARTS[name](_applied[name])
    except BaseException:
        revert(new)
        raise


def unregister() -> None:
    """Leave fla and transformers as they were before the import; :func:`register` and :func:`patch` work again afterwards.

    What was built keeps its classes. `fla_longhorn`'s own ops, layer and models stay importable; on the CPU the layer and the
    models need the part `cpu`.

    Raises:
        RuntimeError: something that was set has been replaced by others since; nothing is reverted then.
    """
    revert(list(_applied))


def revert(names: Iterable[str]) -> None:
    """The parts among `names` that are applied, the last one first."""
    names = set(names)
    chosen = [name for name in reversed(_applied) if name in names]
    Changes.revert_all([_applied[name] for name in chosen])
    for name in chosen:
        del _applied[name]
