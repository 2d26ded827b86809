"""What ranks of context parallelism exchange is on the device: states, summaries and their gradients."""

import json
import os
import subprocess
import sys

from tests.ops.cases import TOLERANCE
from tests.pretend import ranks


def test_two_ranks_equal_one(tmp_path):
    path = tmp_path / 'errors.json'
    done = subprocess.run(
        [sys.executable, '-m', 'tests.pretend.ranks', path], env=os.environ | {'PRETEND_FAST': '1', 'OMP_NUM_THREADS': '1'},
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, jobs = json.loads(path.read_text()), ranks.op.jobs(2)
    assert len(found) == 2 * len(ranks.CASES)
    for name, errors in found.items():
        outputs, gradients = TOLERANCE[jobs[name.rpartition(', ')[0]].case.dtype]
        assert {x for x, error in errors.items() if not error <= (outputs if x == 'o' else gradients)} == set(), (name, errors)
