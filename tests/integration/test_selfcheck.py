"""The check that users run on their own device: right kernels pass, and wrong ones of several kinds are found."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from triton import testing

from fla_longhorn import selfcheck
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.backends import select_backend
from fla_longhorn.selfcheck import case as cases
from fla_longhorn.selfcheck import command, times
from fla_longhorn.selfcheck.case import FLAGS, Case, make_inputs, make_options
from tests import forks

QUICK = ('--quick', '--dtype', 'float32')


@pytest.fixture
def packed_alone(monkeypatch):
    monkeypatch.setattr(cases, 'CASES', {'packed': cases.CASES['packed']})


def test_a_case_sets_every_argument():
    """Operator and reference take what a case sets: nothing else would notice that it leaves an option out."""
    case = replace(Case(), **dict.fromkeys(FLAGS, True), scale=0.5, g='head').packed(3, 4)
    arguments = make_inputs(case) | make_options(case, exact=True)
    assert {*arguments} == {*Arguments._fields}
    assert not [name for name, x in Arguments._field_defaults.items() if arguments[name] is x]


@pytest.mark.slow
def test_command(tmp_path, device):
    """As a user runs it: a table and status 0; all ops, both updates and every dtype are in it."""
    text = forks.output('-m', 'fla_longhorn.selfcheck', '--device', device, cwd=tmp_path)
    assert ' 0 wrong' in text
    for kind in product(selfcheck.OPS, ('diagonal', 'exact'), selfcheck.DTYPES):
        assert re.search(r' +'.join(kind) + r' +\d+ .* ok$', text, re.MULTILINE), kind


def test_the_backend_has_its_name(device):
    """As FLA_LONGHORN_BACKEND takes it, not the name of the module that holds it."""
    assert command.describe(device)['backend'] in {'cpu': ('numba', 'torch', 'triton')}.get(device.type, ('triton',))


def scaled(index):
    """The gradient of the input `index` is off in the third digit."""
    return lambda *gradients: tuple(x * 1.001 if i == index else x for i, x in enumerate(gradients))


def fail(*gradients):
    raise RuntimeError('out of shared memory')


# the pass, what is wrong with its results, and what must be said
WRONG = {
    # one token's outputs are another's
    'row': ('fwd', lambda o, *states: (torch.cat([o[:, :-1], o[:, :1]], 1), *states), 'o is off by'),
    # it keeps what the memory held
    'final state': (
        'fwd', lambda o, final_state, states: (o, torch.empty_like(final_state), states),
        'final_state differs between two runs',
    ),
    'dq': ('bwd', scaled(0), 'dq is off by 1.0e-03, more than 1e-04'),
    'dbeta': ('bwd', scaled(3), 'dbeta is off by 1.0e-03'),
    'dz': ('bwd', scaled(6), 'dz is off by 1.0e-03'),
    # the last bits change from run to run, as sums by atomic additions do
    'noise': (
        'bwd', lambda dq, dk, *others: (dq, dk * (1 + 1e-6 * torch.rand((), device=dk.device)), *others),
        'dk differs between two runs',
    ),
    'error': ('bwd', fail, 'RuntimeError: out of shared memory'),
}


@pytest.mark.parametrize('kind', list(WRONG))
def test_a_wrong_kernel_is_found(kind, packed_alone, monkeypatch, capsys, device):
    which, change, message = WRONG[kind]
    backend, name = select_backend(device), f'longhorn_{which}'
    function = getattr(backend, name)
    monkeypatch.setattr(backend, name, lambda *args, **options: change(*function(*args, **options)))
    assert selfcheck.main(['--device', str(device), *QUICK]) == 1
    out = capsys.readouterr().out
    assert message in out and 'WRONG: chunk_longhorn, diagonal, float32, case "packed" (K = 16): ' in out


def test_cases_that_were_not_reached(packed_alone, tmp_path, monkeypatch, capsys, device):
    """Nothing wrong so far is not all right: status 3, and the last line says what to do, on the screen and in the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, 'REPORT_SECONDS', 0)
    monkeypatch.setattr(command, 'measure_passes', lambda device: [('exact, K = 16', '1.250')])
    assert selfcheck.main(['--device', str(device), '--workers', '1', '--report']) == 3
    out, text = capsys.readouterr().out, (tmp_path / 'longhorn-report.md').read_text()
    told = 'NOT REACHED: 8 cases, for lack of time. Run it again (what was compiled is kept), or --quick: no limit'
    assert out.splitlines()[-1] == text.splitlines()[-2] == told
    assert '0 cases, 0 wrong, ' in out


@pytest.mark.parametrize('options, message', [
    (['--device', 'nowhere'], 'nowhere'),
    (['--backend', 'triton', '--device', 'cpu'], 'FLA_LONGHORN_BACKEND=triton runs on a GPU'),
    (['--dtype', 'float64'], 'float64'),
])
def test_wrong_options(options, message, capsys, monkeypatch):
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', '')
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    with pytest.raises(SystemExit) as exit:
        selfcheck.main(options)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_report(packed_alone, tmp_path, monkeypatch, capsys, device):
    """One file with versions and errors; what fails is in it by name."""
    monkeypatch.chdir(tmp_path)
    # Numba compiles its loops for each dtype
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'torch' if device.type == 'cpu' else '')
    backend = select_backend(device)
    bwd = backend.longhorn_bwd
    monkeypatch.setattr(backend, 'longhorn_bwd', lambda *args, **options: scaled(0)(*bwd(*args, **options)))
    monkeypatch.setattr(command, 'measure_passes', lambda device: [('exact, K = 16', '1.250')])
    assert selfcheck.main(['--device', str(device), '--workers', '1', '--report']) == 1
    text = (tmp_path / 'longhorn-report.md').read_text()
    assert text.startswith('```') and 'torch ' in text and 'exact     bfloat16' in text
    assert 'WRONG: chunk_longhorn, exact, float32, case "packed" (K = 16): dq is off by' in text
    assert 'WRONG: chunk_longhorn, exact' in capsys.readouterr().out
    assert ('exact, K = 16  1.250' in text) == (device.type == 'cuda')


def test_times_beside_those_of_an_h200(monkeypatch, device):
    """Forward and backward of both updates run, by a clock that is none; what does not fit into memory is said."""
    monkeypatch.setattr(times, 'CASE', replace(times.CASE, B=1, T=9, V=8))
    monkeypatch.setattr(testing, 'do_bench', lambda run, return_mode: 1.25 * len(run()))
    head, *rows = times.measure_passes(device)
    assert rows[0] == ('exact, K = 16', '2.500', '0.441', '7.500', '1.119') and len(rows) == 4
    monkeypatch.setattr(times, 'make_inputs', lambda *_: torch.empty(2**60, device=device))
    assert [*times.measure_passes(device)][1][2:] == ('0.441', '-', '1.119')
