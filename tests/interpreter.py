"""Triton's interpreter in half the time, with the same results."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import triton.language as tl
from triton.runtime import interpreter


@cache
def languages(function) -> frozenset[ModuleType]:
    """What `_patch_lang` patches for a function: the modules of Triton's language among its globals."""
    return frozenset(x for x in (tl, tl.core) if any(x is value for value in function.__globals__.values()))


def patch_once_a_launch() -> None:
    """Have a launch patch `triton.language` once, not at every call of a function in it, which is half of the time.

    To patch what is patched replaces functions by their like. Versions of Triton that patch otherwise are left as they are.
    """
    if not hasattr(interpreter, '_LangPatchScope'):
        return
    patch, patched = interpreter._patch_lang, set()

    class Scope(interpreter._LangPatchScope):
        """Triton restores the launch's own, no other."""

        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_lang(function):
        scope = Scope()
        if not languages(function) <= patched:
            patched.update(languages(function))
            scope._changes = patch(function)._changes
        return scope

    interpreter._patch_lang = patch_lang
