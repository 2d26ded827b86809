"""Changes in other packages' modules, classes and mappings, which can be reverted exactly."""

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
    """One value that was set: where, how to read it, and how to revert it."""

    place: str
    value: Any
    read: Callable[[], Any]
    undo: Callable[[], None]


class Changes:
    """Changes in the order they were made."""

    def __init__(self) -> None:
        self.made: list[Change] = []

    def set_attribute(self, owner: ModuleType | type, name: str, value: Any, imported_by: tuple[str, ...] = ()) -> None:
        """`owner.name = value`. `imported_by` are modules that may import the value by name later; reverting includes them."""
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
        """Append a name to a list such as `__all__`, if it is missing."""
        if name not in names:
            names.append(name)
            self.made.append(Change(
                f'{place}[{name!r}]', name, lambda: name if name in names else MISSING, lambda: names.remove(name),
            ))

    @contextmanager
    def of_mapping(self, place: str, mapping: MutableMapping) -> Iterator[None]:
        """Record what the body of `with` sets in a mapping."""
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
            RuntimeError: other code replaced something since; nothing is restored.
        """
        self.revert_all([self])

    @staticmethod
    def revert_all(several: Iterable[Changes]) -> None:
        """Revert several, in this order."""
        several = list(several)
        replaced = [change.place for changes in several for change in changes.made if change.read() is not change.value]
        if replaced:
            raise RuntimeError(f'{", ".join(replaced)} was replaced since; revert that first')
        for changes in several:
            while changes.made:
                changes.made.pop().undo()
