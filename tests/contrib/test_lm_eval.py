"""The evaluation harness on a saved checkpoint: local tasks of its three kinds, no download."""

import json

import pytest

from tests import forks


@pytest.mark.slow
def test_harness(tmp_path, device):
    """Its figures are those that the model gives for one text at a time."""
    printed = forks.output('-m', 'fla_longhorn', forks.SCRIPTS / 'make_checkpoint.py', tmp_path, device, cwd=tmp_path)
    expected = json.loads(printed.splitlines()[-1])
    forks.output(
        '-m', 'fla_longhorn', '-m', 'lm_eval', 'run', '--model', 'hf', '--model_args', 'pretrained=checkpoint,dtype=float32',
        '--tasks', 'real_or_shuffled', 'unseen_text', 'next_words', '--include_path', forks.SCRIPTS / 'tasks',
        '--device', device, '--batch_size', 4, '--output_path', 'out', '--log_samples', cwd=tmp_path,
    )
    report, = (tmp_path / 'out').rglob('results_*.json')
    results = json.loads(report.read_text())['results']
    assert results['unseen_text']['bits_per_byte,none'] == pytest.approx(expected['bits_per_byte'], rel=1e-4)
    assert results['unseen_text']['bits_per_byte,none'] < 5
    assert results['real_or_shuffled']['acc,none'] == expected['acc'] >= 0.75
    assert 'exact_match,none' in results['next_words']
    samples, = (tmp_path / 'out').rglob('samples_next_words_*.jsonl')
    answers = [json.loads(line)['resps'][0][0] for line in samples.read_text().splitlines()]
    assert len(answers) == 12 and any(answers)
