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
from tests.devices import slow_but
from tests.pages import DOCS, blocks

ROOT = forks.ROOT
PAGES = sorted(path.name for path in DOCS.glob('*.md'))
# run by tests of their own, in packages/extras/tests: scale.md and parallel.md in distributed, vision.md in timm
ELSEWHERE = ('evaluate.md', 'gpu.md', 'parallel.md', 'scale.md', 'vision.md')
TEXTS = [path.relative_to(ROOT).as_posix() for path in (
    *ROOT.glob('*.md'), *ROOT.glob('packages/*/README.md'), *ROOT.glob('lab/notebook/*.md'), *sorted(DOCS.glob('*.md')),
)]
# torch.export.load fails beside a default device; the Trainer moves rows of the CPU to its own
WITHOUT_DEFAULT = ('compile.md', 'train.md')
# warnings of transformers and fla that a reader would take for a mistake of the page
UNASKED = 'unexpected behavior|unreliable|pad_token_id|not supported on current platform'
SLOW = ('compile.md', 'own_text.md', 'train.md', 'troubleshoot.md')


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
        done = forks.run('-c', code, cwd=folder, env=environment(folder))
        assert done.returncode == 0, done.stdout + done.stderr
        assert not re.search(UNASKED, done.stderr), done.stderr
    return ''.join(execute(text, folder) for text in blocks(DOCS / page, 'bash'))


@pytest.mark.parametrize('text', TEXTS)
def test_links(text):
    """The files that a text links to are there, and so are the headings."""
    path = ROOT / text
    prose = re.sub(r'^```.*?^```', '', path.read_text(), flags=re.M | re.S)
    for target, heading in re.findall(r'\]\((?!https?://)([^)#]*)#?([^)]*)\)', prose):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        if heading:
            titles = re.findall(r'^#+ (.*)', linked.read_text(), re.M)
            assert heading in [re.sub(r'[^\w -]', '', title.lower()).replace(' ', '-') for title in titles], heading


@pytest.mark.parametrize('page', slow_but({*PAGES} - {*SLOW}, (x for x in PAGES if x not in ELSEWHERE)))
def test_python_blocks(page, tmp_path, device):
    execute_page(page, tmp_path, device)


def test_readme(default_device):
    """In one interpreter from top to bottom."""
    exec(compile('\n'.join(blocks(ROOT / 'README.md', 'python')), 'README.md', 'exec'), {})


@pytest.mark.skipif(torch.cuda.is_available(), reason='fla warns of a CPU')
def test_readme_is_quiet(tmp_path):
    """As a user without a GPU runs it: no line on the screen that asks for an answer."""
    done = forks.run('-c', '\n'.join(blocks(ROOT / 'README.md', 'python')), cwd=tmp_path, fla=False)
    assert (done.returncode, done.stdout) == (0, '') and not re.search(UNASKED, done.stderr), done.stderr


@pytest.mark.slow
def test_gpu(tmp_path, device):
    """The 350M program, at a small size; `bf16` too, which the Trainer takes on a CPU if it is told so."""
    code, = blocks(DOCS / 'gpu.md', 'python')
    for large, small in (
        ('hidden_size=1024, num_hidden_layers=48, vocab_size=50304', 'hidden_size=32, num_hidden_layers=2, vocab_size=64'),
        ('50256', '1'), ('50000', '64'), ('(900, 1500, 700, 1100)', '(9, 15, 7, 11)'),
        ('accumulation_steps=32', 'accumulation_steps=1'),
        ('max_steps=13500', f'max_steps=2, use_cpu={device.type == "cpu"}'),
    ):
        assert large in code
        code = code.replace(large, small)
    forks.output('-c', code + '\nassert trainer.state.global_step == 2', cwd=tmp_path, env=environment(tmp_path))


@pytest.mark.slow
def test_evaluate(tmp_path, device):
    # the command runs in a checkout
    (tmp_path / 'tests').symlink_to(ROOT / 'tests')
    out = execute_page('evaluate.md', tmp_path, device)
    assert '|unseen_text|' in out and 'bits_per_byte' in out
    assert ' 0 wrong' in out
