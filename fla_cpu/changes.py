"""What was changed in modules, classes and mappings of others, to be reverted exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MISSING = object()


@dataclass
class Change:
    """One value that was set: where, what reads it now, and what reverts it."""

    place: str
    value: Any
    read: Callable[[], Any]
    undo: Callable[[], None]


class Changes:
    """Changes in the order in which they were made."""

    def __init__(self) -> None:
        self.made: list[Change] = []

    def __bool__(self) -> bool:
        return bool(self.made)

    def set_attribute(self, owner: ModuleType | type, name: str, value: Any, imported_by: tuple[str, ...] = ()) -> None:
        """`owner.name = value`; modules that import it by name from then on get what was there before back as well."""
        before = vars(owner).get(name, MISSING)

        def undo() -> None:
            for module in (sys.modules[x] for x in imported_by if x in sys.modules):
                if vars(module).get(name) is value:
                    setattr(module, name, before)
            if before is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        self.made.append(Change(f'{owner.__name__}.{name}', value, lambda: vars(owner).get(name, MISSING), undo))

    def append(self, place: str, names: list[str], name: str) -> None:
        """Put a name at the end of a list, such as `__all__`, that does not have it."""
        if name not in names:
            names.append(name)
            self.made.append(Change(
                f'{place}[{name!r}]', name, lambda: name if name in names else MISSING, lambda: names.remove(name),
            ))

    @contextmanager
    def of_mapping(self, place: str, mapping: MutableMapping) -> Iterator[None]:
        """Note what the body of `with` sets in a mapping."""
        before = dict(mapping)
        yield
        for key, value in mapping.items():
            if before.get(key, MISSING) is not value:
                self.made.append(self._of_item(place, mapping, key, value, before.get(key, MISSING)))

    @staticmethod
    def _of_item(place: str, mapping: MutableMapping, key: Any, value: Any, before: Any) -> Change:
        def undo() -> None:
            if before is MISSING:
                del mapping[key]
            else:
                mapping[key] = before

        return Change(f'{place}[{key!r}]', value, lambda: mapping.get(key, MISSING), undo)

    def revert(self) -> None:
        """Restore everything, the last change first.

        Raises:
            RuntimeError: something was replaced by others since; nothing is restored then.
        """
        self.revert_all([self])

    @staticmethod
    def revert_all(several: Iterable[Changes]) -> None:
        """The same of several, in this order."""
        several = list(several)
        replaced = [change.place for changes in several for change in changes.made if change.read() is not change.value]
        if replaced:
            raise RuntimeError(f'{", ".join(replaced)} was replaced since; revert that first')
        for changes in several:
            while changes.made:
                changes.made.pop().undo()
