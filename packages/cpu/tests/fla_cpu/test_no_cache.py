"""Machines on which Numba cannot keep machine code, or may not compile: every loop works from its first call."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch, fla_longhorn
from transformers import AutoConfig, AutoModelForCausalLM
if sys.argv[1] == 'no room':
    # what is written beyond raises OSError, as on a full disk or with a quota
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, 2**12))
for exact in False, True:
    torch.manual_seed(0)
    config = AutoConfig.for_model('longhorn', hidden_size=32, num_hidden_layers=1, vocab_size=50, exact=exact, hidden_ratio=2)
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(3, 23).view(1, 20)
    loss = model(ids, labels=ids).loss
    loss.backward()
    print(f'{loss:.4f}', f'{torch.stack([p.grad.norm() for p in model.parameters()]).norm():.3f}', end=' ')
    print(*model.eval().generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)[0, 20:].tolist())
"""


def run(condition: str, folder, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', PROGRAM, condition], capture_output=True, text=True, cwd=folder,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), 'NUMBA_CACHE_DIR': str(folder / 'cache'), **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope='module')
def expected(tmp_path_factory) -> tuple[str, str]:
    """Results with a cache on disk, and its folder."""
    folder = tmp_path_factory.mktemp('filled')
    return run('a cache', folder), folder


@pytest.mark.slow
def test_no_room(expected, tmp_path):
    assert run('no room', tmp_path) == expected[0]


@pytest.mark.slow
def test_files_that_cannot_be_read(expected):
    """As those of another user: here each index is a folder, which gives an OSError to root too."""
    results, folder = expected
    found = list((folder / 'cache').rglob('*.nbi'))
    for path in found:
        path.unlink()
        path.mkdir()
    assert found and run('unreadable', folder) == results


def test_without_a_compiler_of_loops(expected, tmp_path):
    """NUMBA_DISABLE_JIT, for debugging and coverage, leaves PyTorch's operations."""
    assert run('interpreted', tmp_path, NUMBA_DISABLE_JIT='1') == expected[0]


def test_loops_asked_for_by_name(tmp_path):
    with pytest.raises(AssertionError, match='FLA_LONGHORN_BACKEND=numba needs .* NUMBA_DISABLE_JIT is set'):
        run('interpreted', tmp_path, NUMBA_DISABLE_JIT='1', FLA_LONGHORN_BACKEND='numba')
