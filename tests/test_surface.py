"""The public surface as `tests/surface.json` has it: names, signatures, defaults, parts of patches, options.

The packages' is in `packages/tests/surface.json`.

A change of the surface is a line in that file: `python -m tests.test_surface` writes it again. The diff is what users notice.
"""

import importlib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers

import fla_longhorn
from fla_longhorn.attn_mode import FAMILIES, OPTIONS, REFUSED
from fla_longhorn.ops.backends import BACKENDS
from fla_longhorn.patches import DEFAULT, PARTS
from tests import forks

ROOT = Path(__file__).parents[1]
RECORD = ROOT / 'tests/surface.json'
PACKAGES = (
    'fla_longhorn', 'fla_longhorn.ops', 'fla_longhorn.layers', 'fla_longhorn.models', 'fla_longhorn.models.longhorn',
    'fla_longhorn.modules', 'fla_longhorn.patches', 'fla_longhorn.attn_mode', 'fla_longhorn.hosts',
)
# where a public class is called
METHODS = ('__init__', 'forward', 'generate', 'from_pretrained', 'save_pretrained', 'revert', 'revert_all')
AUTO = ('AutoModel', 'AutoModelForCausalLM', 'AutoModelForSequenceClassification', 'AutoModelForTokenClassification')


def signature(function: Callable) -> str:
    """Parameters and defaults. Annotations are left out: mypy reads them, a call does not."""
    found = inspect.signature(function)
    parameters = [x.replace(annotation=inspect.Parameter.empty) for x in found.parameters.values()]
    return str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def described(x: Any) -> Any:
    """A class by the signatures of its own methods or its fields, a function by its signature, a value by itself."""
    if isinstance(x, type) and hasattr(x, '_fields'):
        return list(x._fields)
    if isinstance(x, type) and getattr(x, '_is_protocol', False):
        methods = {name: y for name, y in vars(x).items() if callable(y) and name[0] != '_' or name == '__call__'}
        return {name: signature(y) for name, y in methods.items()}
    if isinstance(x, type):
        own = {name for base in x.__mro__ if base.__module__.startswith('fla') for name in vars(base)}
        return {name: signature(getattr(x, name)) for name in METHODS if name in own}
    if callable(x):
        return signature(x)
    return sorted(x) if isinstance(x, (dict, frozenset, set)) else x


def exported(packages: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What each package exports; of what an earlier one has, only that."""
    found: dict[str, dict[str, Any]] = {}
    for package in map(importlib.import_module, packages):
        before = {id(getattr(importlib.import_module(name), x)): f'{name}.{x}' for name, names in found.items() for x in names}
        values = {name: getattr(package, name) for name in sorted(public(package))}
        found[package.__name__] = {name: before.get(id(x)) or described(x) for name, x in values.items()}
    return found


def public(package: ModuleType) -> set[str]:
    """`__all__`, and what `__init__.py` imports again under its own name (`from x import y as y`)."""
    source = Path(package.__file__ or '').read_text(encoding='utf-8')
    return {*package.__all__, *(a for a, b in re.findall(r'import (\w+) as (\w+)', source) if a == b)}


def in_fla() -> dict[str, list[str]]:
    """Names that the plugin adds to fla's packages, and the classes in transformers' tables."""
    names = {name: sorted(x for x in importlib.import_module(name).__all__ if 'onghorn' in x) for name in (
        'fla', 'fla.ops', 'fla.layers', 'fla.models',
    )}
    names |= {name: sorted(importlib.import_module(name).__all__) for name in ('fla.ops.longhorn', 'fla.models.longhorn')}
    config = fla_longhorn.LonghornConfig
    auto = [getattr(transformers, name)._model_mapping[config].__name__ for name in AUTO]
    return {**names, 'transformers': [type(transformers.AutoConfig.for_model('longhorn')).__name__, *auto]}


def variables(folders: Iterable[Path]) -> list[str]:
    """Environment variables that packages read."""
    sources = [x.read_text(encoding='utf-8') for folder in folders for x in folder.rglob('*.py')]
    return sorted({x for source in sources for x in re.findall(r"'(FLA_(?:LONGHORN|CPU)\w*)'", source)})


def options(module: str) -> list[str]:
    """Options of a command of the package, as its help names them."""
    return sorted(set(re.findall(r'(?<![\w-])--\w[\w-]*', forks.output('-m', module, '--help'))))


def described_projects(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """What each pyproject.toml offers."""
    projects = [tomllib.loads(x.read_text(encoding='utf-8'))['project'] for x in files]
    return {
        'entry points': {x['name']: x.get('entry-points', {}) for x in projects},
        'extras': {x['name']: sorted(x.get('optional-dependencies', {})) for x in projects},
    }


def surface() -> dict[str, Any]:
    return {
        'names': exported(PACKAGES),
        'fla': in_fla(),
        'attn_mode': {'families': sorted(FAMILIES), 'options': sorted(OPTIONS), 'refused': sorted(REFUSED)},
        'parts': {'all': list(PARTS), 'default': list(DEFAULT)},
        'backends': sorted(BACKENDS),
        'variables': variables([ROOT / 'fla_longhorn']),
        **described_projects([ROOT / 'pyproject.toml']),
        'commands': {'fla_longhorn.selfcheck': options('fla_longhorn.selfcheck')},
    }


def compact(value: Any, depth: int = 0) -> str:
    """JSON with one entry per line, and lists in one line where they fit."""
    line = json.dumps(value)
    if not isinstance(value, dict) or depth and len(line) < 120:
        return line
    inside = ',\n'.join(f'{" " * (depth + 1)}{json.dumps(name)}: {compact(x, depth + 1)}' for name, x in value.items())
    return f'{{\n{inside}\n{" " * depth}}}'


def differences(recorded: Any, found: Any, place: str = '') -> list[str]:
    if isinstance(recorded, dict) and isinstance(found, dict):
        names = [*recorded, *(x for x in found if x not in recorded)]
        return [x for name in names for x in differences(recorded.get(name), found.get(name), f'{place}/{name}')]
    return [] if recorded == found else [f'{place}: recorded {recorded}, found {found}']


def compare(found: dict[str, Any], record: Path) -> None:
    recorded = json.loads(record.read_text(encoding='utf-8'))
    assert not differences(recorded, json.loads(json.dumps(found)))


def write(found: dict[str, Any], record: Path) -> None:
    record.write_text(compact(found) + '\n', encoding='utf-8')


def test_surface_is_the_recorded_one():
    compare(surface(), RECORD)


if __name__ == '__main__':
    os.environ.pop('FLA_LONGHORN_PATCH', None)
    write(surface(), RECORD)
