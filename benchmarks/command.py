"""One entry for many commands: `python -m PACKAGE NAME ...`."""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path


def run(package: str, commands: dict[str, str]) -> int:
    """Call the command that the first argument names with the other arguments; without one, list the names."""
    name, *args = sys.argv[1:] or ['--help']
    if name in commands:
        return importlib.import_module(commands[name]).main(args) or 0
    print(f'usage: python -m {package} NAME ...\n')
    for known, module in commands.items():
        print(f'    {known:20}{docstring(module).splitlines()[0]}')
    return 0 if name in ('-h', '--help') else 2


def docstring(module: str) -> str:
    """A module's docstring, without importing it."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding='utf-8'))) or ''
