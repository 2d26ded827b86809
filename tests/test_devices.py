"""`--device` reaches every file of tests, or its name says why not."""

import ast
from pathlib import Path

from tests.devices import ON_THE_CPU, is_within, why_not

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in (ROOT / 'tests').rglob('test_*.py')}
FIXTURES = {'device', 'default_device', 'triton_device'}


def functions(tree: ast.Module, decorated: str = '') -> list[ast.FunctionDef]:
    """Tests, and what has such a decorator."""
    found = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
    decorators = {x.name: ' '.join(map(ast.unparse, x.decorator_list)) for x in found}
    return [x for x in found if x.name.startswith('test_') or decorated and decorated in decorators[x.name]]


def test_every_file_takes_the_device_or_is_named():
    without = [
        name for name, tree in FILES.items() if why_not(name) is None
        and not any(FIXTURES & {x.arg for x in function.args.args} for function in functions(tree, 'fixture'))
    ]
    assert not without


def test_every_name_is_of_a_test():
    there = {f'{name}::{test.name}' for name, tree in FILES.items() for test in functions(tree)}
    assert {name for test in there for name in ON_THE_CPU if is_within(test, name)} == set(ON_THE_CPU)
