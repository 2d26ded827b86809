"""The main job: the data obeys its definition, and the command runs, leaves its files and can be resumed."""

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from examples.mqar.__main__ import main
from examples.mqar.config import RunArguments
from examples.mqar.data import BLANK, IGNORE, MQAR, examples, is_held_out


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


@pytest.mark.parametrize(('kind', 'name', 'options'), [
    (MQAR, 'vocab_size', {'vocab_size': 33}),
    (MQAR, 'num_pairs', {'vocab_size': 16, 'num_pairs': 8}),
    (MQAR, 'seq_len', {'seq_len': 63, 'num_pairs': 8}),
    (MQAR, 'power_a', {'power_a': 1.5}),
    (RunArguments, 'steps', {'steps': 0}),
    (RunArguments, 'target_recall', {'target_recall': 1.2}),
    (RunArguments, 'device', {'device': 'tpu'}),
])
def test_bad_options(kind, name, options):
    with pytest.raises(ValueError, match=f'^{name} must be'):
        kind(**options)


SMALL = {
    'vocab_size': 16, 'seq_len': 16, 'num_pairs': 2, 'hidden_size': 16, 'state_size': 4, 'steps': 20, 'batch_size': 32,
    'warmup_steps': 2, 'learning_rate': 1e-2, 'eval_steps': 10, 'eval_size': 32, 'test_size': 64, 'test_size_per_count': 16,
    'num_questions': 2, 'save_steps': 10,
}


def run_command(folder, device, *options: str, **changes) -> int:
    named = SMALL | changes | {'output_dir': folder, 'device': device}
    return main([*(f'--{name}={value}' for name, value in named.items()), *options])


def test_the_command_and_what_it_resumes(tmp_path, device):
    """1 says that the target was missed; a run from its checkpoint ends with the same weights."""
    folder, resumed = tmp_path / 'whole', tmp_path / 'resumed'
    assert run_command(folder, device, '--both', target_recall=1) == 1
    assert (folder / 'mqar.png').read_bytes().startswith(b'\x89PNG')
    report = json.loads((folder / 'mqar.json').read_text())
    assert report['steps'] == report['options']['steps'] == 20
    assert 0 <= report['recall'] < 1
    assert AutoModelForCausalLM.from_pretrained(folder / 'checkpoint').config.exact
    # the other form is another model with the same task and seed
    assert (report['form'], report['beside']['form']) == ('exact', 'diagonal')
    assert not AutoModelForCausalLM.from_pretrained(folder / 'diagonal/checkpoint').config.exact
    assert report['history'] != report['beside']['history'] and report['beside']['steps'] == 20
    assert [(r['num_pairs'], r['seq_len'], r['trained']) for r in report['recall_by_pairs']] == [
        (1, 16, True), (2, 16, True), (3, 16, False), (4, 16, False),
    ]
    losses = [entry['loss'] for entry in report['history'] if 'loss' in entry]
    assert losses[-1] < losses[0]
    for answer in report['answers']:
        assert len(answer['pairs']) == 2 and answer['right'] == (answer['answer'] == answer['truth'])
        assert [answer['query'], answer['truth']] in answer['pairs']
    shutil.copytree(folder / 'trainer' / 'checkpoint-10', resumed / 'trainer' / 'checkpoint-10')
    assert run_command(resumed, device, '--resume', target_recall=0) == 0
    whole, parts = (
        AutoModelForCausalLM.from_pretrained(path / 'checkpoint').state_dict() for path in (folder, resumed)
    )
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
