"""Launch parameters from a file of `fla_longhorn.tune` in place of the rules'."""

import json

import pytest
import triton

import fla_longhorn
from fla_longhorn.ops.triton import tuned
from fla_longhorn.ops.triton.device import make_card
from fla_longhorn.ops.triton.diagonal import configs as diagonal
from fla_longhorn.ops.triton.exact import configs as exact
from fla_longhorn.ops.triton.launch import RULES
from fla_longhorn.tune import TRIED, save
from offgpu.absent_device import DEVICES

H100, A100 = (make_card(DEVICES[name].target, DEVICES[name].properties) for name in ('sm_90', 'sm_80'))
ROW = {
    'rule': 'chunk_longhorn_exact_fwd_kernel_o', 'key': tuned.key_of(64, 512, 'bf16'), 'pass': 'forward',
    'changes': {'STAGES': 4, 'ROWS': 8}, 'ms': 1.0, 'verdict': 'fastest',
}


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / 'tuned.json'
    monkeypatch.setattr(tuned, 'PATH', str(path))
    tuned.read_choices.cache_clear()
    save(str(path), [ROW], H100)
    return path


def test_a_choice_is_used(path):
    """By the rule, sizes and precision that it was made for, and by what follows from that rule."""
    config = exact.for_forward(64, 512, 'bf16', H100)
    assert (config.STAGES, config.ROWS) == (4, 8)
    assert exact.for_states(64, 512, 'bf16', H100).ROWS == 8
    others = (
        (exact.for_forward, 64, 1024, 'bf16'), (exact.for_forward, 64, 512, 'tf32'), (exact.for_backward, 64, 512, 'bf16'),
        (diagonal.for_forward, 64, 512, 'bf16'),
    )
    for rule, *arguments in others:
        assert rule(*arguments, H100) == rule.__wrapped__(*arguments, H100)


def test_without_the_variable_nothing_is_read(path, monkeypatch):
    path.write_text('nothing')
    monkeypatch.setattr(tuned, 'PATH', None)
    assert exact.for_forward(64, 512, 'bf16', H100) == exact.for_forward.__wrapped__(64, 512, 'bf16', H100)


@pytest.mark.parametrize('name', ['triton', 'fla-longhorn', 'card'])
def test_a_file_of_other_circumstances_is_not_used(path, name, monkeypatch):
    card = H100
    if name == 'triton':
        monkeypatch.setattr(triton, '__version__', '3.99.0')
    elif name == 'card':
        card = A100
    else:
        monkeypatch.setattr(fla_longhorn, '__version__', '99')
    with pytest.warns(UserWarning, match=f'was tuned with another {name}, and is not used'):
        config = exact.for_forward(64, 512, 'bf16', card)
    assert config == exact.for_forward.__wrapped__(64, 512, 'bf16', card)


@pytest.mark.parametrize('text', [
    '', '{', '[]', '{}', '{"made_with": {}, "choices": {"x": {"y": 1}}}', '{"made_with": 1, "choices": {}}', None,
])
def test_a_broken_file_raises(path, text):
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(ValueError, match=f'FLA_LONGHORN_TUNED names {path}, which is no file of'):
        exact.for_forward(64, 512, 'bf16', H100)


@pytest.mark.parametrize('changes', [{'STAGE': 2}, {'BS': 48}])
def test_parameters_that_the_kernel_has_not_raise(path, changes):
    save(str(path), [{**ROW, 'changes': {}}, {**ROW, 'changes': changes}], H100)
    with pytest.raises(ValueError, match='in which chunk_longhorn_exact_fwd_kernel_o has'):
        exact.for_forward(64, 512, 'bf16', H100)


def test_a_file_keeps_what_was_tuned_before(path):
    """Of other kernels and sizes; another card's is begun anew."""
    other = {**ROW, 'key': tuned.key_of(16, 64, 'bf16')}
    save(str(path), [{**other, 'changes': {}, 'verdict': ''}, other], H100)
    content = json.loads(path.read_text())
    assert set(content['choices'][ROW['rule']]) == {ROW['key'], other['key']} and len(content['measured']) == 3
    save(str(path), [{**other, 'changes': {}, 'verdict': ''}], H100)
    content = json.loads(path.read_text())
    assert set(content['choices'][ROW['rule']]) == {ROW['key']} and len(content['measured']) == 2
    save(str(path), [other], A100)
    assert set(json.loads(path.read_text())['choices'][ROW['rule']]) == {other['key']}


def test_every_rule_of_training_is_tuned():
    assert {*RULES} == {*TRIED, 'longhorn_step_kernel', 'fused_recurrent_longhorn_exact_fwd_kernel'}
