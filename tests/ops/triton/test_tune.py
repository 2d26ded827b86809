"""`fla_longhorn.tune` with planted times: what it keeps, and what it must not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from fla_longhorn import tune
from fla_longhorn.ops.triton import tuned
from fla_longhorn.ops.triton.launch import RULES
from fla_longhorn.selfcheck.case import Case
from fla_longhorn.selfcheck.report import describe
from fla_longhorn.tune import CHUNK, TRIED, Call, main, rules_of

CASE = Case(B=1, T=20, H=1, K=16, V=80, sigmoid=True, D=True, z=True, final_state=False)
OWN = dict(RULES)
ASKED = {
    False: {'forward': ['fwd_kernel', 'prepare_kernel'], 'backward': ['bwd_kernel', 'reduce_kernel']},
    True: {'forward': ['kernel_gram', 'fwd_kernel_o'], 'backward': ['bwd_kernel_replay', 'bwd_kernel', 'bwd_kernel_qk']},
}


@pytest.fixture
def call(device):
    return lambda exact: Call(CASE, exact, device)


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch):
    monkeypatch.setenv('FLA_LONGHORN_BACKEND', 'triton')


def try_only(monkeypatch, **parameters):
    """Of the rules, by the ends of their names."""
    monkeypatch.setattr(tune, 'TRIED', {
        name: values for name in TRIED for end, values in parameters.items() if name.endswith(end)
    })


def planted(ms):
    """A timer: `ms` of the launch parameters that are tried, and 1 where the rules choose."""
    def timer(run):
        run()
        tried = [rule(0, 0, '', None) for name, rule in RULES.items() if rule is not OWN[name]]
        return ms(tried[0]) if tried else 1.0
    return timer


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_all_kernels_of_a_step(call, exact):
    prefix = CHUNK if exact else 'longhorn_'
    names = {step: [prefix + name for name in kernels] for step, kernels in ASKED[exact].items()}
    rules = rules_of(call(exact))
    assert {step: [rule.name for rule in rules if rule.step == step] for step in names} == names
    assert RULES == OWN


@pytest.mark.parametrize(('ms', 'kept'), [(0.5, True), (1 - tune.GAIN / 2, False)])
def test_what_is_faster_is_kept(call, ms, kept, monkeypatch):
    try_only(monkeypatch, longhorn_fwd_kernel=('U',), longhorn_reduce_kernel=('BT',))
    rows = tune.tune(call(False), planted(lambda config: ms if getattr(config, 'U', 0) == 1 else 1.5))
    fastest = [(row['rule'], row['changes']) for row in rows if row['verdict'] == 'fastest']
    assert fastest == ([('longhorn_fwd_kernel', {'U': 1})] if kept else [])
    assert [row['changes'] for row in rows] == [{}, {'U': 1}, {'U': 2}, {}, {'BT': 16}, {'BT': 64}]


def test_other_bits_are_not_kept(call, monkeypatch):
    """However fast: blocks of fewer channels add a product's sum in another order."""
    try_only(monkeypatch, bwd_kernel_qk=('BV',))
    rows = tune.tune(call(True), planted(lambda config: 0.1))
    assert [(row['verdict'], row['ms']) for row in rows] == [("the rule's", 1.0), *[('other bits', None)] * 2]


def test_what_cannot_run_is_passed_over(call, monkeypatch):
    try_only(monkeypatch, longhorn_fwd_kernel=('U',))
    monkeypatch.setitem(tune.NEXT, 'U', lambda x: (3,))
    _, row = tune.tune(call(False), planted(lambda config: 0.1))
    assert row['verdict'].startswith('AssertionError') and row['ms'] is None


def test_command(device, tmp_path, monkeypatch, capsys):
    """As a user runs it; then with its file, to the same bits."""
    monkeypatch.chdir(tmp_path)
    sizes = ('--hidden_size', '32', '--state_size', '16', '--batch_size', '1', '--seq_len', '20', '--workers', '1', '--exact')
    if device.type == 'cpu':
        pytest.skip('needs a GPU, as `test_a_cpu_is_refused` says')
    monkeypatch.setattr(tuned, 'PATH', None)
    case = replace(CASE, dtype=torch.bfloat16)
    before = Call(case, True, device).run()
    assert main([*sizes, '--device', str(device)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f'export FLA_LONGHORN_TUNED={tmp_path}/tuned.json'
    content = json.loads((tmp_path / 'tuned.json').read_text())
    assert {row['rule'] for row in content['measured']} == {CHUNK + name for names in ASKED[True].values() for name in names}
    assert {row['call']['K'] for row in content['measured']} == {case.K}
    monkeypatch.setattr(tuned, 'PATH', str(tmp_path / 'tuned.json'))
    tuned.read_choices.cache_clear()
    assert all(map(torch.equal, Call(case, True, device).run(), before))
    assert f'those of {tmp_path}/tuned.json' in describe(device)['launch parameters']


def test_a_cpu_is_refused(monkeypatch, capsys):
    monkeypatch.delenv('FLA_LONGHORN_BACKEND')
    with pytest.raises(SystemExit):
        main(['--device', 'cpu'])
    assert 'nothing to tune without a GPU; the device is cpu' in capsys.readouterr().err
