"""A Numba that is installed and cannot be imported: PyTorch's loops run, as where it is absent, and a warning says why."""

import os

import pytest

from tests import forks

PROGRAM = """
import sys, warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    import fla_longhorn as f
    from fla.modules import RMSNorm
    from fla_longhorn.ops import backends
    x = torch.randn(1, 70, 1, 16)
    for _ in range(2):
        o, _ = f.chunk_longhorn(x, x, x, x.sigmoid())
        RMSNorm(16)(x)
    model = f.LonghornForCausalLM(f.LonghornConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    ids = torch.randint(64, (1, 20))
    model(ids, labels=ids).loss.backward()
    model.eval().generate(ids, max_new_tokens=2)
    wanted, _ = f.naive_recurrent_longhorn(x, x, x, x.sigmoid())
assert (o - wanted).norm() < 1e-5 * wanted.norm()
chosen = backends.backend_name('cpu', None, backends.loops)
print(chosen, *(str(x.message) for x in caught if 'Numba' in str(x.message)), sep='\\n')
"""
ERRORS = {
    'another NumPy': "raise ImportError('Numba needs NumPy 2.3 or less. Got NumPy 2.4.')",
    'no LLVM': "raise OSError('Could not find/load shared object file: libllvmlite.so')",
    'a name that NumPy lacks': 'import math; math.no_such_name',
    'compiled for another NumPy': "raise SystemError('initialization of _internal failed without raising an exception')",
}


def run(body: str, folder, program: str, **environment: str):
    package = folder / 'numba'
    package.mkdir()
    (package / '__init__.py').write_text(body + '\n')
    path = os.pathsep.join(map(str, (folder, *forks.PATHS)))
    return forks.run('-c', program, env={'PYTHONPATH': path, **environment})


@pytest.mark.parametrize('error', ERRORS)
def test_pytorch_computes(error, tmp_path):
    done = run(ERRORS[error], tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    backend, *warned = done.stdout.strip().splitlines()
    assert backend == 'torch' and len(warned) == 1
    assert 'Numba is installed and cannot be imported; PyTorch computes' in warned[0]


def test_asked_for_by_name(tmp_path):
    """Numba's own error, not another backend."""
    call = 'import torch, fla_longhorn as f; x = torch.ones(1, 2, 1, 4); f.chunk_longhorn(x, x, x, x)'
    done = run(ERRORS['no LLVM'], tmp_path, call, FLA_LONGHORN_BACKEND='numba')
    assert done.returncode != 0 and 'OSError: Could not find/load shared object file: libllvmlite.so' in done.stderr
