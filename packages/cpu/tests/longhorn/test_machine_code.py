"""Loops from the cache on disk have the bits of those that a process compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
# K = 64: a norm's loop over keys, which LLVM unrolls where it can
PROGRAM = '''
import hashlib, sys, torch
from fla_longhorn.ops import chunk_longhorn

for gate in sys.argv[1:]:
    for exact in (False, True):
        torch.manual_seed(0)
        x = [torch.randn(1, 40, 1, n, requires_grad=True) for n in (64, 64, 40, 40)]
        g = torch.zeros(1, 40, 1) if gate == 'zero' else None
        o, _ = chunk_longhorn(*x, g=g, exact=exact, use_beta_sigmoid_in_kernel=True)
        found = [o.detach(), *torch.autograd.grad(o.sum(), x)]
        print(exact, *[hashlib.sha256(y.numpy().tobytes()).hexdigest() for y in found])
'''


@pytest.mark.slow
def test_a_process_that_compiles_and_one_that_loads(tmp_path):
    """Without a gate, then with a gate of zero beside it, which the second process compiles and the third one loads."""
    def printed(*gates):
        env = os.environ | {'FLA_LONGHORN_BACKEND': 'numba', 'NUMBA_CACHE_DIR': str(tmp_path), 'OMP_NUM_THREADS': '1'}
        done = subprocess.run([sys.executable, '-c', PROGRAM, *gates], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first = printed('none')
    assert len(first) == 2
    for _ in range(2):
        assert printed('none', 'zero') == first * 2
