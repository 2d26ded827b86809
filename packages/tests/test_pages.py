"""What pages, READMEs, docstrings and errors tell a reader to type exists: extras, groups, modules, targets, files."""

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest
import yaml

from fla_longhorn.selfcheck.command import parse_args
from tests import forks
from tests.pages import blocks

ROOT = forks.ROOT
TRACKED = subprocess.run(['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split('\n')[:-1]
PAGES = [path for path in TRACKED if path.endswith('.md') and path != 'CHANGELOG.md']
FORMS = [path for path in TRACKED if path.startswith('.github/ISSUE_TEMPLATE/')]
# programs that a user has, not tests: they hold wrong names on purpose
PROGRAMS = [path for path in TRACKED if path.endswith('.py') and 'tests' not in path.split('/')]
DISTRIBUTIONS = {
    tomllib.loads((ROOT / path).read_text())['project']['name']: path.removesuffix('pyproject.toml').rstrip('/') or '.'
    for path in TRACKED if path.endswith('pyproject.toml')
}
# a module of a package that a page installs first
HOSTS = ('vllm', 'sglang', 'pytest', 'pip', 'MODULE', 'PACKAGE')
SYNONYMS = {'timm': r'timm|\[vision\]'}
# of a path as it is written from a folder
UP = r'^(\.\.?/)+(?=\w)'
FILES = '\n'.join(TRACKED)
# made by a command, or what a test writes
MADE = re.compile(r'\.venv|outputs/|build/')
# these name programs that only the history has, and files of other projects
HISTORY = {
    'lab/README.md', 'lab/notebook/objectives.md', 'lab/notebook/others.md', 'lab/notebook/paper.md',
    'packages/offgpu/offgpu/calibration/README.md',
}


def lines_with(pattern: str, paths: list[str]) -> list[tuple[str, str]]:
    """What the pattern finds, with the file."""
    return [(path, found) for path in paths for found in re.findall(pattern, (ROOT / path).read_text(), re.M)]


def extras(folder: str) -> set[str]:
    project = tomllib.loads((ROOT / folder / 'pyproject.toml').read_text())['project']
    return set(project.get('optional-dependencies', ()))


def test_what_pip_is_told_to_install():
    """A folder with a pyproject.toml and extras that it has; no package of this repository is published under a name."""
    found = lines_with(r'pip install ([^`\n]*)', PAGES + PROGRAMS)
    assert len(found) > 10
    for path, words in found:
        for word in re.findall(r"[\w./-]+(?:\[[\w,]+\])?", words.split('#')[0]):
            name, _, chosen = word.rstrip(']').partition('[')
            assert name not in DISTRIBUTIONS, f'{path} installs {name} by name, which is not published'
            if name.startswith('.'):
                folder = name.rstrip('.') or '.'
                assert (ROOT / folder / 'pyproject.toml').exists(), f'{path}: {word}'
                assert set(chosen.split(',')) <= extras(folder) | {''}, f'{path}: {word}'


def test_groups():
    groups = tomllib.loads((ROOT / 'pyproject.toml').read_text())['dependency-groups']
    assert {name for _, name in lines_with(r'--group (\w+)', PAGES + PROGRAMS + ['Makefile'])} <= set(groups)


def test_modules():
    """Each `python -m MODULE`, with the name that it is called by in a checkout."""
    found = lines_with(r'(?:python|[^\w]-m|python3) -m ([A-Za-z]\w*(?:\.\w+)*)', PAGES + PROGRAMS + FORMS)
    assert len(found) > 50
    for path, module in found:
        if module.split('.')[0] not in HOSTS:
            assert find_spec(module) is not None, f'{path}: python -m {module}'


def test_forms_of_issues():
    """A forge shows a form that has these keys; that of a bug asks for the report by its name."""
    forms = {path: yaml.safe_load((ROOT / path).read_text()) for path in FORMS if not path.endswith('/config.yml')}
    for path, form in forms.items():
        assert form.keys() >= {'name', 'description', 'body'}, path
        for item in form['body']:
            assert item['type'] in ('checkboxes', 'dropdown', 'input', 'textarea'), path
            assert item['attributes']['label'], path
    report = parse_args(['--report']).report
    items = forms['.github/ISSUE_TEMPLATE/bug.yml']['body']
    asked = [x for x in items if str(report) in x['attributes'].get('description', '')]
    assert [x['validations']['required'] for x in asked] == [True]


def test_targets():
    targets = set(re.findall(r'^([\w-]+)(?: [\w-]+)*:', (ROOT / 'Makefile').read_text(), re.M))
    targets |= set(re.search(r'^\.PHONY: (.*)', (ROOT / 'Makefile').read_text(), re.M)[1].split())
    for path, name in lines_with(r'`make ([a-z][\w-]*)`', PAGES + PROGRAMS):
        assert name in targets, f'{path}: make {name}'


@pytest.mark.parametrize('path', sorted({*PAGES} - HISTORY))
def test_files(path):
    """A path or a program in backquotes is of a file here, by its whole name or by the end of it."""
    text = re.sub(r'^```.*?^```', '', (ROOT / path).read_text(), flags=re.M | re.S)
    names = re.findall(r'`((?:[\w.-]+/)+[\w.-]*|\w+/|\w+\.py)`', text)
    ends = {name: re.escape(re.sub(UP, '', name)) for name in names if not MADE.match(name)}
    assert not [name for name, end in ends.items() if not re.search(f'(^|/){end}', FILES, re.M)]


def test_sizes():
    """README in a hundred and twenty lines, a page in ten more, the guide in 100 kB."""
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in PAGES if path.startswith('docs/')}
    assert max(lines.values()) <= 130, lines
    assert len((ROOT / 'README.md').read_text().splitlines()) <= 120
    assert sum((ROOT / path).stat().st_size for path in lines) <= 100_000


# what `pip install '.[cpu]'` brings, and what docs/README.md says once for all pages
BASE = {'fla', 'fla_longhorn', 'fla_longhorn_extras', 'tokenizers', 'torch', 'transformers'} | sys.stdlib_module_names
# what an import needs beside it
NEEDS = {'Trainer': 'accelerate', 'fla_longhorn_extras.timm': 'timm'}


@pytest.mark.parametrize('page', ['README.md', *(path for path in PAGES if path.startswith('docs/'))])
def test_packages(page):
    """A package that a page's code imports is in the installation of README.md, or the page says how to get it."""
    text = (ROOT / page).read_text()
    code = '\n'.join(blocks(ROOT / page, 'python'))
    imported = {name.partition('.')[0] for name in re.findall(r'^\s*(?:import|from) ([\w.]+)', code, re.M)} - BASE
    imported |= {module for name, module in NEEDS.items() if re.search(rf'import .*\b{re.escape(name)}\b', code)}
    installed = ' '.join(re.findall(r'pip install ([^`\n]*)', text))
    assert {name for name in imported if not re.search(SYNONYMS.get(name, name), installed)} == set()


@pytest.mark.parametrize('package', ['benchmarks', 'lab.experiments'])
def test_usage(package):
    """The usage is what was typed."""
    assert forks.output('-m', package).startswith(f'usage: python -m {package} NAME')
