"""The compiled kernels of the exact update hold their figures: no spills, no shuffles, few instructions (no GPU needed)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# one worker: what the module's fixture computes is most of its time
pytestmark = pytest.mark.xdist_group('compiled exact')

ROOT = Path(__file__).parents[2]
# (kernel, K, states saved for backward) -> most instructions a (token, channel), spilled values, shuffles
FIGURES = {
    ('fwd', 16, False): (30, 0, 0),
    ('fwd', 64, False): (40, 0, 0),
    ('fwd', 128, False): (50, 60, 0),
    ('fwd', 16, True): (38, 0, 0),
    ('recurrent', 16, False): (140, 0, 12),
    ('replay', 16, False): (36, 0, 0),
    ('bwd', 16, False): (36, 0, 0),
    ('qk', 16, False): (6, 0, 0),
}
SCRIPT = """
import json, sys
from benchmarks.exact_rows import exact_kernel, measure
for name, K, saving in json.loads(sys.argv[1]):
    print(json.dumps(measure(exact_kernel(name, K, SAVE_STATES=saving), 'sm_90')), flush=True)
"""


@pytest.fixture(scope='module')
def measured() -> dict[tuple, dict]:
    """The figures, from a process of its own: under `TRITON_INTERPRET` kernels don't compile."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    environment['PYTHONPATH'] = os.pathsep.join([str(ROOT), environment.get('PYTHONPATH', '')])
    process = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', SCRIPT, json.dumps(list(FIGURES))], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return dict(zip(FIGURES, map(json.loads, process.stdout.splitlines()), strict=True))


@pytest.mark.parametrize('row', FIGURES, ids=str)
def test_compiled_figures(measured, row):
    figures = measured[row]
    names = ('instructions_per_token_channel', 'spills', 'shuffles')
    assert all(figures[name] <= most for name, most in zip(names, FIGURES[row], strict=True)), figures
