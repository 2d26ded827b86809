"""Which modules of the package make up its core, where each goes in fla's tree, and their text there."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

ROOT = Path(__file__).parents[2]
# what users import, and the backends that `ops/backends.py` imports by name; the core is what these import
ROOTS = (
    'fla_longhorn.ops', 'fla_longhorn.ops.torch', 'fla_longhorn.ops.triton', 'fla_longhorn.layers.longhorn',
    'fla_longhorn.models.longhorn',
)
# packages whose place fla's own have: their `__init__` stays
OWN = {'fla_longhorn.layers': 'fla.layers', 'fla_longhorn.models': 'fla.models', 'fla_longhorn.modules': 'fla.modules'}
# what stands for something of fla's, which is taken in its place
MODELING = 'fla.models.modeling_utils'
THEIRS = {
    **{f'fla_longhorn.modules.{name}': 'fla.modules' for name in ('GatedMLP', 'L2Norm', 'RMSNorm')},
    **{f'fla_longhorn.models.base.{name}': MODELING for name in (
        'FLAForCausalLM', 'FLAModel', 'FLAPreTrainedModel', 'get_attention',
    )},
}
# module or package -> its place; the longest name decides
PLACES = {
    'fla_longhorn.ops': 'fla.ops.longhorn',
    'fla_longhorn.modules': 'fla.layers.longhorn_utils',
    'fla_longhorn.layers': 'fla.layers.longhorn_utils',
    'fla_longhorn.layers.longhorn': 'fla.layers.longhorn',
    'fla_longhorn.models.longhorn': 'fla.models.longhorn',
}
# the first patches have the exact form alone, so in fla's tree it is the default: else the last would change their calls
DEFAULTS = {
    'exact: bool = False': 'exact: bool = True',
    'The exact form. Default: `False`, the diagonal one, as in the paper.':
        'The exact form, else the diagonal one. Default: `True`.',
    'instead of the diagonal approximation (Eq. 7). Default: `False`.':
        'instead of the diagonal approximation (Eq. 7). Default: `True`.',
    'The defaults are the paper\'s.': 'But for `exact`, the defaults are the paper\'s.',
    'the defaults are the paper\'s 120M model': 'but for `exact`, the defaults are the paper\'s 120M model',
}
# as fla names such things; its variable turns to general kernels too
NAMES = {'fla_longhorn::': 'fla::', 'FLA_LONGHORN_GENERAL_KERNELS': 'FLA_DISABLE_BACKEND_DISPATCH'}
# each of these parts of fla imports itself and those before it
ORDER = ('utils', 'ops', 'modules', 'layers', 'models')
# beside itself and Python's library
IMPORTED = {'einops', 'fla', 'torch', 'transformers', 'triton'}
NAME = re.compile(r'(?<![\w.])fla_longhorn(?:\.\w+)+')


def file_of(module: str) -> Path | None:
    """A module's file, `None` if there is no such module."""
    path = ROOT.joinpath(*module.split('.'))
    return next((x for x in (path.with_suffix('.py'), path / '__init__.py') if x.is_file()), None)


def place_of(name: str) -> str | None:
    """The place of a module, or of what it holds; `None` if it stays in the plugin."""
    if name in OWN:
        return OWN[name]
    known = name
    while known not in PLACES:
        known, _, last = known.rpartition('.')
        if not known:
            return None
        # what `fla_longhorn.layers` exports is in `fla.layers`
        if known in OWN and file_of(f'{known}.{last}') is None:
            return OWN[known] + name.removeprefix(known)
    place = PLACES[known]
    return None if place is None else place + name.removeprefix(known)


def is_theirs(node: ast.AST) -> bool:
    """Whether a statement imports what fla has too."""
    return isinstance(node, ast.ImportFrom) and any(f'{node.module}.{alias.name}' in THEIRS for alias in node.names)


def imports(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, set[str]]]:
    """Each statement, and the modules that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            inside = {f'{node.module}.{alias.name}' for alias in node.names}
            found = {name for name in inside if name.startswith('fla_longhorn.') and file_of(name)}
            yield node, found if len(found) == len(inside) else {node.module or '', *found}


def find_core() -> dict[str, Path]:
    """Module -> file of all that :data:`ROOTS` import, in functions and for types too."""
    core: dict[str, Path] = {}
    left = list(ROOTS)
    while left:
        module = left.pop()
        path = file_of(module)
        if module in core or path is None or module == 'fla_longhorn' or place_of(module) is None:
            continue
        core[module] = path
        left.append(module.rpartition('.')[0])
        if module not in OWN:
            found = imports(ast.parse(path.read_text(encoding='utf-8')))
            left += [x for node, modules in found if not is_theirs(node) for x in modules if x.startswith('fla_longhorn.')]
    return {module: core[module] for module in sorted(core) if module not in OWN}


def destination(module: str) -> Path:
    """The file of a module in fla's tree."""
    path = Path(*str(place_of(module)).split('.'))
    source = file_of(module)
    return path / '__init__.py' if source is not None and source.name == '__init__.py' else path.with_suffix('.py')


def rename(text: str) -> tuple[str, list[int], list[int]]:
    """The text in fla's tree, and the numbers of the lines that changed: those of imports, and the others."""
    lines, packages = text.splitlines(keepends=True), {}
    for node, modules in imports(ast.parse(text)):
        packages |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), package_of(node, modules))
    in_imports, others = [], []
    for number, line in enumerate(lines, 1):
        package = packages.get(number)
        there = NAME.sub(lambda found, package=package: package or place_of(found[0]) or found[0], line)
        lines[number - 1] = reduce(lambda x, names: x.replace(*names), NAMES.items(), there)
        if lines[number - 1] != line:
            (in_imports if number in packages else others).append(number)
    return ''.join(lines), in_imports, others


def with_exact_default(modules: dict[str, str]) -> dict[str, str]:
    """The texts of public modules with the exact form as their default."""
    everything = '\n'.join(modules.values())
    if missing := [old for old in DEFAULTS if old not in everything]:
        raise ValueError(f'no module has the lines that say what is the default: {missing}')
    public = re.compile('|'.join(map(re.escape, DEFAULTS)))
    return {
        name: text if name == 'fla_longhorn.ops.arguments' else public.sub(lambda x: DEFAULTS[x[0]], text)
        for name, text in modules.items()
    }


def package_of(node: ast.Import | ast.ImportFrom, modules: set[str]) -> str | None:
    """The package in which a `from package import module` finds its modules; `None` for other imports."""
    if is_theirs(node):
        return THEIRS[f'{node.module}.{node.names[0].name}']
    if isinstance(node, ast.Import) or node.module in modules:
        return None
    packages = {str(place_of(x)).rpartition('.')[0] for x in modules}
    if len(packages) > 1:
        raise ValueError(f'modules of one import must have one place: {ast.unparse(node)}')
    return packages.pop()


def check_module(place: str, text: str) -> None:
    """Raise if a module in fla's tree names the plugin, or imports another package or a part of fla that stands above it."""
    if named := re.findall(r'(?i).*fla.longhorn.*', text):
        raise ValueError(f'{place} names the plugin: {named}')
    tree = ast.parse(text)
    for_types = {
        id(node) for test in ast.walk(tree) if isinstance(test, ast.If) and ast.unparse(test.test) == 'TYPE_CHECKING'
        for node in ast.walk(test)
    }
    level = ORDER.index(place.split('.')[1])
    for node, modules in imports(tree):
        for module in modules:
            package, _, rest = module.partition('.')
            if package not in IMPORTED | sys.stdlib_module_names:
                raise ValueError(f'{place} imports {module}, which fla has not')
            above = package == 'fla' and rest.split('.')[0] in ORDER[level + 1:]
            if above and id(node) not in for_types:
                raise ValueError(f'{place} imports {module}, which imports {".".join(place.split(".")[:2])} itself')
