"""Which statements of the package that ask for a device did not run, by the coverage of a run: `... device_lines .coverage`.

They are what a run on a device is for. `make device-lines` fails where one of them did not run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage

PACKAGE = Path(__file__).parents[4] / 'fla_longhorn'
WORDS = {'cpu', 'cuda', 'device', 'device_type', 'is_cpu', 'is_cuda'}


def device_lines(source: str) -> set[int]:
    """The lines of `source` where a statement starts that names a device; of one with a body, its head counts alone."""
    return {
        node.lineno for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and WORDS & set(names(node))
    }


def names(statement: ast.stmt) -> Iterator[str]:
    body = [x for x in ast.iter_child_nodes(statement) if isinstance(x, (ast.stmt, ast.ExceptHandler))]
    for child in ast.iter_child_nodes(statement):
        if child not in body:
            for node in ast.walk(child):
                yield from (x for x in map(vars(node).get, ('id', 'attr', 'arg')) if isinstance(x, str))


def main(path: str) -> int:
    data = coverage.CoverageData(path)
    data.read()
    total, left = 0, []
    for file in sorted(PACKAGE.rglob('*.py')):
        lines = device_lines(file.read_text())
        total += len(lines)
        left += [f'{file.relative_to(PACKAGE.parent)}:{line}' for line in sorted(lines - set(data.lines(str(file)) or ()))]
    print(f'{total - len(left)} of {total} statements that name a device ran', *left, sep='\n')
    return bool(left)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
