"""Which names of fla and transformers our sources use, read from the sources.

Found are imports, attributes of what was imported (`ops.sigmoid_fwd`, `FLAModel.forward`, `wrap(ops, 'name')`), attributes of
parameters that are annotated with an imported class (`cp_context.group`), what a class takes from or overrides in an imported
base, and strings that are the path of a module. A path that is put together when the program runs is found as a pattern:
`fla.models.*`.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

PACKAGES = ('fla', 'transformers')
PATH = re.compile(r'(fla|transformers)(\.\w+)+')


def find_uses(root: Path) -> dict[str, str]:
    """Every name used in the package at `root`, with the first place that uses it."""
    uses: dict[str, str] = {}
    sources = {path: ast.parse(path.read_text()) for path in sorted(root.rglob('*.py'))}
    classes = {}
    for path, tree in sources.items():
        module = '.'.join(path.relative_to(root.parent).with_suffix('').parts).removesuffix('.__init__')
        names = bindings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [resolve(base, names) or f'{module}.{ast.unparse(base)}' for base in node.bases]
                classes[f'{module}.{node.name}'] = bases
    for path, tree in sources.items():
        module = '.'.join(path.relative_to(root.parent).with_suffix('').parts).removesuffix('.__init__')
        names = bindings(tree)
        for name, line in [*uses_of_names(tree, names), *uses_of_parameters(tree, names), *uses_of_strings(tree)]:
            uses.setdefault(name, f'{path.relative_to(root.parent)}:{line}')
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for name, line in uses_of_bases(node, foreign_bases(f'{module}.{node.name}', classes)):
                    uses.setdefault(name, f'{path.relative_to(root.parent)}:{line}')
    return uses


def bindings(tree: ast.AST) -> dict[str, str]:
    """What each name that an import binds stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: f'{node.module}.{alias.name}' for alias in node.names})
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split('.')[0]] = alias.name if alias.asname else alias.name.split('.')[0]
    return names


def is_foreign(name: str | None) -> bool:
    return name is not None and name.split('.')[0] in PACKAGES


def resolve(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted path of `a.b.c`, where `a` is imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, names)
        return None if owner is None else f'{owner}.{node.attr}'
    return None


def uses_of_names(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and is_foreign(node.module):
            yield from ((f'{node.module}.{alias.name}', node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if is_foreign(alias.name))
        elif isinstance(node, ast.Attribute) and is_foreign(name := resolve(node, names)):
            yield name, node.lineno
        elif isinstance(node, ast.Call) and len(node.args) > 1 and is_foreign(owner := resolve(node.args[0], names)):
            # `replaces(ops, 'sqrelu_fwd')`, as of getattr
            if isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
                yield f'{owner}.{node.args[1].value}', node.lineno


def uses_of_parameters(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[str, int]]:
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.Lambda)):
            continue
        annotated = {}
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            parts = ast.walk(argument.annotation) if argument.annotation is not None else ()
            found = {name for part in parts if is_foreign(name := resolve(part, names)) and is_class(name)}
            if len(found) == 1:
                annotated[argument.arg] = found.pop()
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in annotated:
                owner = annotated[node.value.id]
                # the fields of a config are its family's, and read by name
                if not owner.endswith('Config'):
                    yield f'{owner}.{node.attr}', node.lineno


def uses_of_strings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and PATH.fullmatch(node.value):
            yield node.value, node.lineno
        elif isinstance(node, ast.JoinedStr):
            text = ''.join(part.value if isinstance(part, ast.Constant) else '*' for part in node.values)
            if PATH.match(text) and ' ' not in text:
                yield text, node.lineno


def foreign_bases(name: str, classes: dict[str, list[str]]) -> list[str]:
    """The imported classes that a class of ours extends, directly or through other classes of ours."""
    found = []
    for base in classes.get(name, ()):
        found += [base] if is_foreign(base) else foreign_bases(base, classes)
    return found


def uses_of_bases(node: ast.ClassDef, bases: list[str]) -> Iterator[tuple[str, int]]:
    """Methods and attributes that the class reads from its bases or overrides."""
    used = {}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) in ('self', 'super()'):
            used.setdefault(part.attr, part.lineno)
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            used.setdefault(part.name, part.lineno)
        elif isinstance(part, ast.Assign):
            used.update({target.id: part.lineno for target in part.targets if isinstance(target, ast.Name)})
    for name, line in used.items():
        owner = next((base for base in bases if has(load(base), name)), None)
        if owner is not None and not name.startswith('__'):
            yield f'{owner}.{name}', line


def load(path: str) -> Any:
    """What is at a dotted path: a module or what one holds; None for what a class gives its instances.

    Raises:
        AttributeError, ImportError: there is nothing.
    """
    owner, _, name = path.rpartition('.')
    if not owner:
        return importlib.import_module(name)
    found = load(owner)
    if isinstance(found, ModuleType) and not hasattr(found, name):
        with suppress(ModuleNotFoundError):
            return importlib.import_module(path)
    if isinstance(found, type) and not hasattr(found, name) and has(found, name):
        return None
    return getattr(found, name)


def has(owner: type, name: str) -> bool:
    """Whether a class has an attribute, or its instances get it when they are built; not where every module has it."""
    if hasattr(owner, name):
        return not hasattr(nn.Module, name) or getattr(owner, name) is not getattr(nn.Module, name)
    own = [vars(base) for base in owner.__mro__ if base not in nn.Module.__mro__]
    set_by_init = (getattr(names.get('__init__'), '__wrapped__', names.get('__init__')) for names in own)
    return any(name in names.get('__annotations__', ()) for names in own) or any(
        name in init.__code__.co_names for init in set_by_init if hasattr(init, '__code__')
    )


def is_class(path: str) -> bool:
    try:
        return isinstance(load(path), type)
    except (AttributeError, ImportError):
        return False
