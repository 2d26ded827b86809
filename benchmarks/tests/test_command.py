"""`python -m benchmarks NAME`: every name has a command."""

import importlib
import sys

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.command import run


@pytest.mark.parametrize('module', benchmarks.COMMANDS.values())
def test_every_name_is_a_command(module, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(module).main(['--help'])
    assert end.value.code == 0 and capsys.readouterr().out.startswith(f'usage: python -m {module.split(".")[0]} ')


@pytest.mark.parametrize(('arguments', 'status'), [([], 0), (['--help'], 0), (['opss'], 2)])
def test_names_are_listed(arguments, status, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['benchmarks', *arguments])
    assert run('benchmarks', benchmarks.COMMANDS) == status
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith('    ')]
    assert listed == list(benchmarks.COMMANDS)
