"""Apply and revert parts."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fla_longhorn.patches.changes import Changes
from fla_longhorn.patches.parts import PARTS

# environment variable with the names of the parts to apply, separated by commas, or `none`
VARIABLE = 'FLA_LONGHORN_PATCH'
DEFAULT = tuple(PARTS)

# the parts that are applied, first to last, with what each changed
_applied: dict[str, Changes] = {}


def register() -> None:
    """Apply the parts in `FLA_LONGHORN_PATCH`, by default :data:`DEFAULT`; called when the package is imported.

    Raises:
        ValueError: the variable names an unknown part.
    """
    patch(**dict.fromkeys(asked(os.environ.get(VARIABLE)), True))


def asked(value: str | None) -> tuple[str, ...]:
    names = DEFAULT if not value else () if value.strip() == 'none' else tuple(x.strip() for x in value.split(','))
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f'{VARIABLE} must name parts of {", ".join(PARTS)}, separated by commas, or be none, got {unknown}')
    return names


def patch(**parts: bool) -> None:
    """Apply the parts that are true and revert those that are false; others do not change.

    Args:
        parts (bool):
            `names`, `attn_mode`, `packages` and `trainer`, described in `docs/swap.md`.

    Raises:
        ValueError: an unknown part.
        RuntimeError: other code has replaced a change of a part to revert; nothing is reverted then.

    Examples::
        >>> fla_longhorn.patch(packages=False, trainer=False)
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
    """Revert all parts; :func:`register` and :func:`patch` can be called again.

    Modules that are already built keep their classes.

    Raises:
        RuntimeError: other code has replaced a change; nothing is reverted then.
    """
    revert(list(_applied))


def revert(names: Iterable[str]) -> None:
    """Revert the applied parts among `names`, the last one first."""
    names = set(names)
    chosen = [name for name in reversed(_applied) if name in names]
    Changes.revert_all([_applied[name] for name in chosen])
    for name in chosen:
        del _applied[name]
