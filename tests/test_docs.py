"""README.md and the pages of docs/ run as they are: a page's python blocks in one process, its bash blocks in a shell.

`sh` blocks are for machines that a test can't have; `json` is what a server answered.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import forks

ROOT = forks.ROOT
DOCS = ROOT / 'docs'
PAGES = sorted(path.name for path in DOCS.glob('*.md'))
# run by a test of their own, scale.md by tests/distributed and vision.md by packages/extras/tests/timm
ELSEWHERE = ('README.md', 'evaluate.md', 'flame.md', 'scale.md', 'train.md', 'vision.md')
TEXTS = [path.relative_to(ROOT).as_posix() for path in (
    ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', ROOT / 'CHANGELOG.md', *sorted(DOCS.glob('*.md')),
)]
# torch.export.load fails beside a default device; the Trainer moves rows of the CPU to its own
WITHOUT_DEFAULT = ('compile.md', 'train.md')
PROGRAM = '''
import os
from transformers import AutoConfig
assert AutoConfig.for_model('longhorn').model_type == 'longhorn'
print('ran', __name__, os.environ.get('RANK', 0))
'''


def blocks(path: Path, language: str) -> list[str]:
    """The code in a language, in order."""
    found = re.findall(r'^```(\w*)\n(.*?)^```', path.read_text(), re.M | re.S)
    assert {name for name, _ in found} <= {'python', 'bash', 'sh', 'json', 'math', 'bibtex'}
    return [code for name, code in found if name == language]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']])
    return {**os.environ, **forks.ENVIRONMENT, 'PATH': path, 'HF_HOME': str(folder / 'hf')}


def execute(text: str, folder: Path) -> str:
    done = subprocess.run(['bash', '-euc', text], cwd=folder, env=environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def execute_page(page: str, folder: Path, device: torch.device) -> str:
    """All python blocks, which make their tensors on the device, then all bash blocks; what the latter print."""
    own = device.type == 'cpu' or page in WITHOUT_DEFAULT
    code = '' if own else f'import torch\ntorch.set_default_device({str(device)!r})\n'
    code += '\n'.join(blocks(DOCS / page, 'python'))
    if code:
        forks.output('-c', code, cwd=folder, env=environment(folder))
    return ''.join(execute(text, folder) for text in blocks(DOCS / page, 'bash'))


@pytest.mark.parametrize('text', TEXTS)
def test_links(text):
    """The files that a text links to are there, and so are the headings."""
    path = ROOT / text
    for target, heading in re.findall(r'\]\((?!https?://)([^)#]*)#?([^)]*)\)', path.read_text()):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        if heading:
            titles = re.findall(r'^#+ (.*)', linked.read_text(), re.M)
            assert heading in [re.sub(r'[^\w -]', '', title.lower()).replace(' ', '-') for title in titles], heading


@pytest.mark.parametrize('page', [
    # Inductor compiles whole models
    pytest.param(page, marks=[pytest.mark.slow] if page == 'compile.md' else []) for page in PAGES if page not in ELSEWHERE
])
def test_python_blocks(page, tmp_path, device):
    execute_page(page, tmp_path, device)


def test_readme(default_device):
    """In one interpreter from top to bottom."""
    code = blocks(ROOT / 'README.md', 'python')
    assert len(code) == 2
    exec(compile('\n'.join(code), 'README.md', 'exec'), {})


@pytest.mark.slow
def test_train(tmp_path, device):
    (tmp_path / 'package').mkdir()
    for path in ('script.py', 'package/module.py'):
        (tmp_path / path).write_text(PROGRAM)
    out = execute_page('train.md', tmp_path, device)
    # alone as a script, as a module and under accelerate, and on two ranks
    assert out.count('ran __main__ 0') == 4 and out.count('ran __main__ 1') == 1
    assert out.strip().endswith('LonghornForCausalLM')


@pytest.mark.slow
def test_evaluate(tmp_path, device):
    # the command runs in a checkout
    (tmp_path / 'tests').symlink_to(ROOT / 'tests')
    forks.output('-m', 'fla_longhorn', forks.SCRIPTS / 'make_checkpoint.py', '.', device, cwd=tmp_path)
    out = execute_page('evaluate.md', tmp_path, device)
    assert '|unseen_text|' in out and 'bits_per_byte' in out
    assert ' 0 wrong' in out and (tmp_path / 'selfcheck.json').exists()
