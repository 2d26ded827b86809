"""fla's tree, and Longhorn in it, patch by patch (`pieces.py`), from the package's core (`core.py`)."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import fla

from fla_longhorn.patches.parts import AUTO_CLASSES
from tests.upstream.core import check_module, find_core, rename, with_exact_default
from tests.upstream.pieces import INSERTED, PIECES, insert, texts_of

VERSION = '0.6.0'
# fla's tree is in two distributions
DISTRIBUTIONS = ('fla-core', 'flash-linear-attention')
# the rules of fla's pyproject.toml, which its distributions lack
LINT = (
    '--target-version', 'py310', '--line-length', '127', '--config', 'lint.isort.known-first-party = ["fla"]',
    '--select', 'E,F,UP,B,SIM,I,C4,TC,T,RUF022',
    '--ignore', 'E501,E741,B006,B007,B008,B023,B028,B904,B905,C408,C416,C417,T201,TC002,TC003,SIM102,SIM108,SIM118,SIM211',
    '--fix', '--unsafe-fixes', '--fixable', 'I,F401,RUF022,TC001,TC005,TC006',
    '--per-file-ignores', '__init__.py:F401', '--per-file-ignores', 'tests/*/*.py:UP030',
)
UTILS = 'fla/layers/longhorn_utils'


@dataclass
class Report:
    """What was written."""

    # without tests
    lines: int = 0
    imports: int = 0
    # file and text of renamed lines that are no imports
    others: list[tuple[str, str]] = field(default_factory=list)
    # places in fla's lists that are not there
    missing: list[tuple[str, str]] = field(default_factory=list)
    patch: str = ''
    name: str = ''
    changes: str = ''
    text: str = ''


def make_tree(folder: Path, installed: bool = False) -> None:
    """fla 0.6.0 in `folder`: from the package index, or the installed one, which has no tests and no pyproject.toml."""
    if installed:
        shutil.copytree(Path(fla.__file__).parent, folder / 'fla', ignore=shutil.ignore_patterns('__pycache__'))
        return
    with tempfile.TemporaryDirectory() as downloads:
        for name in DISTRIBUTIONS:
            command = [
                sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--no-binary', name, '--no-build-isolation',
                '--dest', downloads, f'{name}=={VERSION}',
            ]
            if subprocess.run(command).returncode:
                raise SystemExit(
                    f'{name}=={VERSION} did not come from the package index: without a network, `--installed` takes the '
                    'installed fla, and DIR may be a tree of it'
                )
        for archive in sorted(Path(downloads).iterdir()):
            with tarfile.open(archive) as files:
                # Python before 3.11.4 has neither filters nor the argument
                files.extraction_filter = getattr(tarfile, 'data_filter', None)
                files.extractall(downloads)
            shutil.copytree(str(archive).removesuffix('.tar.gz'), folder, dirs_exist_ok=True)


def add_piece(folder: Path, number: int) -> Report:
    """Write all modules and tests of Longhorn as they are in a piece, and its lines in fla's lists."""
    report, root = Report(), (folder / 'fla/__init__.py').read_text(encoding='utf-8')
    header = root[:root.index('\n\n') + 2]
    core = {module: path.read_text(encoding='utf-8') for module, path in find_core().items()}
    core['fla_longhorn.models.longhorn'] = with_auto_classes(core['fla_longhorn.models.longhorn'])
    texts = texts_of(with_exact_default(core), number)
    if any(place.startswith(UTILS) for place in texts):
        texts[f'{UTILS}/__init__.py'] = '"""What the Longhorn layer is made of."""\n'
    for place, source in texts.items():
        text, imports, others = rename(source)
        report.imports += len(imports)
        report.others += [(place, text.splitlines()[number - 1].strip()) for number in others]
        if place.startswith('fla/'):
            check_module(place.removesuffix('.py').replace('/', '.'), text)
            report.lines += text.count('\n')
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + text, encoding='utf-8')
    if number == 0:
        report.missing = insert(folder)
    changed = [export(folder, package, names) for package, names in PIECES[number].exports.items()]
    tidy([x for x in (*(folder / place for place in (*texts, *INSERTED)), *changed) if x.suffix == '.py' and x.exists()])
    return report


def with_auto_classes(text: str) -> str:
    """`fla/models/longhorn/__init__.py` with the registrations of fla's own models."""
    config = 'LonghornConfig'
    calls = [f'AutoConfig.register({config}.model_type, {config}, exist_ok=True)\n']
    calls += [f'{auto}.register({config}, {cls}, exist_ok=True)\n' for auto, (cls, _) in AUTO_CLASSES.items()]
    start, end = text.index('\nfrom '), text.index('\n__all__')
    added = f'\nfrom transformers import AutoConfig, {", ".join(AUTO_CLASSES)}\n'
    return text[:start] + added + text[start:end] + '\n' + ''.join(calls) + text[end:]


def export(folder: Path, package: str, names: tuple[str, ...]) -> Path:
    """Add names to an `__init__` of fla and to its `__all__`; :func:`tidy` moves them to their places."""
    path = folder.joinpath(*package.split('.'), '__init__.py')
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
    body = ast.parse(''.join(lines)).body
    exported = next(x for x in body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == '__all__')
    last = [x for x in body if isinstance(x, ast.ImportFrom)][-1]
    module = f'{package}.longhorn' if last.level == 0 else '.longhorn'
    end, after = exported.end_lineno or 0, last.end_lineno or 0
    lines[end - 1:end - 1] = [f"    '{name}',\n" for name in names]
    lines[after:after] = [f'from {module} import {", ".join(names)}\n']
    path.write_text(''.join(lines), encoding='utf-8')
    return path


def tidy(paths: list[Path]) -> None:
    """Imports and `__all__` in the order of fla's ruff, and its other rules; raise if a file keeps to one of them not."""
    if find_spec('ruff') is None:
        raise SystemExit('imports are sorted by ruff, which is not installed: `make setup` brings it')
    done = subprocess.run(
        [sys.executable, '-m', 'ruff', 'check', '--isolated', '--output-format', 'concise', *LINT, *paths],
        capture_output=True, text=True,
    )
    if done.returncode:
        raise SystemExit(f"fla's ruff refuses the tree:\n{done.stdout}{done.stderr}")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(['git', *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def write_patches(folder: Path, installed: bool = False, pieces: int | None = None) -> list[Report]:
    """Make the tree where there is none, put Longhorn into it piece by piece, and write each difference."""
    if not (folder / 'fla').exists():
        if folder.exists() and any(folder.iterdir()):
            raise SystemExit(f'DIR must be a tree of fla, empty or new, got {folder}')
        make_tree(folder, installed)
    if f"__version__ = '{VERSION}'" not in (folder / 'fla/__init__.py').read_text(encoding='utf-8').replace('"', "'"):
        raise SystemExit(f'DIR must be a tree of fla {VERSION}, got another version in {folder}')
    if (folder / 'fla/ops/longhorn').exists():
        raise SystemExit(f'DIR must be a tree of fla without Longhorn, which {folder} has')
    if not (folder / '.git').exists():
        git(folder, 'init', '--quiet')
        git(folder, 'add', '--all')
    elif git(folder, 'status', '--porcelain'):
        raise SystemExit(f'DIR must have no changes of its own, which `git status` shows in {folder}')
    reports = []
    for number, piece in enumerate(PIECES[:pieces]):
        base = git(folder, 'write-tree').strip()
        report = add_piece(folder, number)
        git(folder, 'add', '--all')
        report.patch, report.name = f'longhorn-{number + 1}.patch', piece.name
        report.changes = git(folder, 'diff', '--cached', '--shortstat', base).strip()
        report.text = git(folder, 'diff', '--cached', '--no-color', base)
        reports.append(report)
    # behind, for a patch holds no other
    for report in reports:
        (folder / report.patch).write_text(report.text, encoding='utf-8')
    return reports
