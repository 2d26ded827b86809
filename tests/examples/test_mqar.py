"""The main job: the data obeys its definition, and the command runs, leaves its files and can be resumed."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from examples.mqar.__main__ import main
from examples.mqar.config import RunArguments
from examples.mqar.data import BLANK, IGNORE, MQAR, HeldOut, TrainingStream, draw, examples, is_held_out
from examples.mqar.evaluate import pair_counts


@st.composite
def tasks(draw_from):
    num_pairs = draw_from(st.integers(1, 12))
    return MQAR(
        vocab_size=2 * (1 + num_pairs + draw_from(st.integers(4, 20))),
        seq_len=4 * num_pairs + 2 * draw_from(st.integers(4, 20)),
        num_pairs=num_pairs,
        power_a=draw_from(st.sampled_from([0.01, 0.5, 1.0])),
    )


@given(tasks(), st.integers(0, 2**31), st.booleans())
def test_sequences_obey_the_definition(task, seed, held_out):
    tokens, labels = examples(task, 16, (seed,), held_out)
    half = task.vocab_size // 2
    assert tokens.shape == labels.shape == (16, task.seq_len)
    assert (is_held_out(tokens) == held_out).all()
    for slots, answers in zip(tokens.reshape(16, -1, 2).tolist(), labels.reshape(16, -1, 2).tolist(), strict=True):
        n = sum(answer != IGNORE for _, answer in answers)
        assert 1 <= n <= task.num_pairs
        pairs = dict(slots[:n])
        assert len(pairs) == len(set(pairs.values())) == n
        assert all(1 <= key < half <= value < task.vocab_size for key, value in pairs.items())
        asked = []
        for i, ((key, value), (at_key, at_value)) in enumerate(zip(slots, answers, strict=True)):
            assert at_key == IGNORE
            if at_value != IGNORE:
                assert i >= n and value == at_value == pairs[key]
                asked.append(key)
            elif i >= n:
                assert (key, value) == (BLANK, BLANK)
        assert sorted(asked) == sorted(pairs)


def test_gaps_follow_the_power_law():
    task = MQAR(vocab_size=16, seq_len=34, num_pairs=1, power_a=0.3)
    _, labels = draw(task, np.ones(40_000, dtype=int), np.random.default_rng(0))
    gaps = labels.reshape(40_000, -1, 2)[:, 1:, 1].argmax(axis=1)
    p = np.arange(1, 17) ** (task.power_a - 1)
    torch.testing.assert_close(np.bincount(gaps, minlength=16) / 40_000, p / p.sum(), rtol=0, atol=0.01)


def test_every_key_and_value_is_as_likely():
    task = MQAR(vocab_size=16, seq_len=8, num_pairs=2)
    tokens, _ = draw(task, np.full(20_000, 2), np.random.default_rng(0))
    share = np.bincount(tokens[:, :4].ravel(), minlength=16) / 40_000
    torch.testing.assert_close(share[1:], np.array([1 / 7] * 7 + [1 / 8] * 8), rtol=0, atol=0.01)


def test_numbers_of_pairs_are_mixed():
    task = MQAR(num_pairs=8)
    _, labels = examples(task, 8_000, (0,), held_out=False)
    share = np.bincount((labels != IGNORE).sum(axis=1), minlength=9)[1:] / 8_000
    torch.testing.assert_close(share, np.full(8, 1 / 8), rtol=0, atol=0.02)


def test_the_seed_decides():
    def first(seed):
        return torch.stack([row['input_ids'] for row, _ in zip(TrainingStream(MQAR(), seed, block=3), range(7), strict=False)])

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
    assert len(set(map(tuple, first(1).tolist()))) == 7
    assert torch.equal(HeldOut(MQAR(), 5, (1, 0))[4]['input_ids'], HeldOut(MQAR(), 5, (1, 0))[4]['input_ids'])


@pytest.mark.parametrize('name, options', [
    ('vocab_size', {'vocab_size': 33}),
    ('vocab_size', {'vocab_size': 2}),
    ('num_pairs', {'num_pairs': 0}),
    ('num_pairs', {'vocab_size': 16, 'num_pairs': 8}),
    ('seq_len', {'seq_len': 30, 'num_pairs': 8}),
    ('seq_len', {'seq_len': 63, 'num_pairs': 8}),
    ('power_a', {'power_a': 0.0}),
    ('power_a', {'power_a': 1.5}),
])
def test_bad_task(name, options):
    with pytest.raises(ValueError, match=f'^{name} must be'):
        MQAR(**options)


def test_a_task_too_small_to_hold_sequences_out():
    with pytest.raises(ValueError, match='vocab_size=4, seq_len=4 and num_pairs=1 allow too few'):
        examples(MQAR(vocab_size=4, seq_len=4, num_pairs=1), 64, (0,), held_out=True)


@pytest.mark.parametrize('name, value', [('steps', 0), ('batch_size', 0), ('target_recall', 1.2), ('device', 'tpu')])
def test_bad_run(name, value):
    with pytest.raises(ValueError, match=f'^{name} must be'):
        RunArguments(**{name: value})


def test_bad_command(capsys, tmp_path):
    for options, message in ((['--power_a', '2'], 'power_a must be'), (['--resume'], 'resume needs a training checkpoint')):
        with pytest.raises(SystemExit) as exit:
            main([*options, '--output_dir', str(tmp_path)])
        assert exit.value.code == 2
        assert message in capsys.readouterr().err


def test_recall_is_measured_beyond_training():
    assert pair_counts(MQAR(num_pairs=4)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pair_counts(MQAR(vocab_size=12, num_pairs=4)) == [1, 2, 3, 4, 5]
    assert max(pair_counts(MQAR(vocab_size=256, seq_len=256, num_pairs=64))) == 127


SMALL = {
    'vocab_size': 16, 'seq_len': 16, 'num_pairs': 2, 'hidden_size': 16, 'state_size': 4, 'steps': 20, 'batch_size': 32,
    'warmup_steps': 2, 'learning_rate': 1e-2, 'eval_steps': 10, 'eval_size': 32, 'test_size': 64, 'test_size_per_count': 16,
    'num_questions': 2, 'save_steps': 10,
}


def run_command(folder, device, *options: str, **changes) -> int:
    named = SMALL | changes | {'output_dir': folder, 'device': device}
    return main([*(f'--{name}={value}' for name, value in named.items()), *options])


@pytest.fixture(scope='module')
def finished(tmp_path_factory, device):
    """A tiny run, whose target is out of reach: its folder and exit status."""
    folder = tmp_path_factory.mktemp('mqar')
    return folder, run_command(folder, device, target_recall=1)


def test_the_command(finished, device):
    folder, status = finished
    assert status == 1
    assert (folder / 'mqar.png').read_bytes().startswith(b'\x89PNG')
    report = json.loads((folder / 'mqar.json').read_text())
    assert report['steps'] == report['options']['steps'] == 20
    assert 0 <= report['recall'] < 1
    assert [(r['num_pairs'], r['seq_len'], r['trained']) for r in report['recall_by_pairs']] == [
        (1, 16, True), (2, 16, True), (3, 16, False), (4, 16, False),
    ]
    assert {'fla-longhorn', 'torch', 'transformers', 'flash-linear-attention'} <= set(report['versions'])
    assert report['device'].startswith('CPU') == (device.type == 'cpu')
    assert report['seconds']['training'] < report['seconds']['total']
    losses = [entry['loss'] for entry in report['history'] if 'loss' in entry]
    assert losses[-1] < losses[0]
    for answer in report['answers']:
        assert len(answer['pairs']) == 2 and answer['right'] == (answer['answer'] == answer['truth'])
        assert [answer['query'], answer['truth']] in answer['pairs']


def test_success_is_status_0_and_the_checkpoint_resumes(finished, tmp_path, device):
    folder, _ = finished
    resumed = tmp_path / 'resumed'
    shutil.copytree(folder / 'trainer' / 'checkpoint-10', resumed / 'trainer' / 'checkpoint-10')
    assert run_command(resumed, device, '--resume', target_recall=0) == 0
    whole, parts = (
        AutoModelForCausalLM.from_pretrained(path / 'checkpoint').state_dict() for path in (folder, resumed)
    )
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
