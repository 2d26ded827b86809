"""The entry point by which vLLM finds the models."""

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]
GROUP = 'vllm.general_plugins'
# in a process that has imported nothing
LOAD = '''
import sys
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins
load_general_plugins()
names = {'LonghornForCausalLM', 'LonghornHybridForCausalLM'}
models = [x for x in sys.modules if x.startswith('fla_longhorn.serving.vllm.m')]
print(names <= set(ModelRegistry.get_supported_archs()), models)
'''


def test_inert():
    """What the entry point names can be imported without vLLM, and importing the package does not."""
    entry_points = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['entry-points'][GROUP]
    assert entry_points == {'longhorn': 'fla_longhorn.serving.vllm:register'}
    code = 'import sys, fla_longhorn; print([x for x in sys.modules if x.startswith(("vllm", "fla_longhorn.serving"))])'
    done = forks.run('-c', code, fla=False)
    assert done.stdout.strip() == '[]', done.stderr
    assert callable(pkgutil.resolve_name(entry_points['longhorn']))


def test_registered_without_the_models():
    pytest.importorskip('vllm', reason='make test-serving has vLLM')
    done = subprocess.run([sys.executable, '-c', LOAD], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split('\n')[-2] == 'True []', done.stdout + done.stderr
