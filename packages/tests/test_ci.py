"""A test that no target runs does not exist: a target of `.ci/run` has each, or it is named here with the reason."""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from tests.__main__ import read_parts

ROOT = Path(__file__).parents[2]
FOLDERS = ('tests', 'packages', 'benchmarks', 'examples', 'lab')
# a test
LEFT_OUT = {
    'packages/offgpu/tests/kernels/test_compiled.py::test_every_kernel_compiles':
        'minutes of compiling for every card: `make test-all`',
    'packages/extras/tests/test_scalar_beta.py::test_kernels': "fla's kernels need a GPU; the interpreter runs the same cases",
}


@dataclass(frozen=True)
class Command:
    """A run of pytest."""

    paths: tuple[str, ...]
    deselected: str
    marks: str
    interprets: bool


def read(words: list[str]) -> Command:
    """Of a run's arguments and environment. Those chosen by a word of their names (`-k`) are taken as none."""
    options = dict(zip(words, words[1:], strict=False))
    deselected = options.get('--deselect', '')
    found = () if '-k' in options else tuple(x for x in words if x.split('/')[0] in FOLDERS and x != deselected)
    assert all((ROOT / x.partition('::')[0]).exists() for x in found), found
    return Command(found, deselected, options.get('-m', ''), 'TRITON_INTERPRET=1' in words)


@cache
def commands() -> list[Command]:
    """Those of the targets that `.ci/run` names."""
    targets = re.search(r'^targets=\((.+?)\)', (ROOT / '.ci' / 'run').read_text(), re.M | re.S)[1].split()
    printed = subprocess.run(['make', '-n', *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for line in printed.replace('\\\n', ' ').splitlines():
        program, runs_pytest, arguments = line.partition(' -m pytest ')
        if runs_pytest:
            found.append(read([*shlex.split(program), *shlex.split(arguments)]))
        elif ' -m tests' in line:
            for part in read_parts(shlex.split(line.partition(' -m tests')[2]), None):
                found.append(read([*part.arguments, *(f'{name}={x}' for name, x in part.environment.items())]))
    return found


def holds(condition: ast.expr, interprets: bool) -> bool:
    """Of an `if` around tests, on a machine without a GPU."""
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    names = {'torch': torch, 'INTERPRETING': interprets, 'TRITON_DEVICE': 'cpu' if interprets else None}
    return bool(eval(ast.unparse(condition), names))


def is_slow(decorators: list[ast.expr]) -> bool:
    return any('mark.slow' in ast.unparse(x) and 'parametrize' not in ast.unparse(x) for x in decorators)


def list_tests(body: list[ast.stmt], interprets: bool, slow: bool = False) -> Iterator[tuple[str, bool, bool]]:
    """Name, whether it is slow, and whether it is there, of each test."""
    for node in body:
        if isinstance(node, ast.Assign) and 'pytestmark' in map(ast.unparse, node.targets):
            slow |= is_slow([node.value])
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name.lower().startswith('test'):
            yield node.name, slow or is_slow(node.decorator_list), True
        elif isinstance(node, ast.If):
            there = holds(node.test, interprets)
            for part, chosen in ((node.body, there), (node.orelse, not there)):
                yield from ((name, late, chosen and inner) for name, late, inner in list_tests(part, interprets, slow))


def is_of_one_target(settings: str) -> bool:
    return 'collect_ignore' in settings and '`make test-' in settings


def runs(command: Command, file: Path) -> set[str]:
    """The tests of `file` that `command` collects."""
    name = file.relative_to(ROOT).as_posix()
    # a folder whose conftest.py ignores it but in one target is not collected elsewhere
    settings = {folder: folder / 'conftest.py' for folder in file.relative_to(ROOT).parents}
    own = [ROOT / folder for folder, x in settings.items() if (ROOT / x).exists() and is_of_one_target((ROOT / x).read_text())]
    chosen = set()
    for path in command.paths:
        given, _, test = path.partition('::')
        if not file.is_relative_to(ROOT / given) or not all((ROOT / given).is_relative_to(folder) for folder in own):
            continue
        for function, slow, there in list_tests(ast.parse(file.read_text()).body, command.interprets):
            wanted = not slow if command.marks == 'not slow' else slow if command.marks == 'slow' else True
            if there and wanted and test in ('', function) and f'{name}::{function}' != command.deselected:
                chosen.add(f'{name}::{function}')
    return chosen


def test_a_target_runs_every_test():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob('test_*.py')]
    missing = set()
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        every = {f'{name}::{x}' for x, *_ in list_tests(ast.parse(file.read_text()).body, False)}
        assert every, f'{name} has no test'
        missing |= every - set().union(*(runs(command, file) for command in commands()))
    assert missing == {*LEFT_OUT}, f'in no target: {missing - {*LEFT_OUT}}; in one: {LEFT_OUT.keys() - missing}'
