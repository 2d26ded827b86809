"""Average perplexity of the eight sets against tokens seen, on small local data of the same format."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from experiments import language_modeling, perplexity
from fla_longhorn import LonghornConfig
from tests.contrib.test_lm_eval_tasks import write_table_2

# as the tasks of lm_eval word the documents of tests/contrib/test_lm_eval_tasks.py, with the right answer
TEXTS = {
    'PIQA': 'Question: Open a jar\nAnswer: Turn the lid.', 'HellaSwag': 'Riding: A man rides. He flies.',
    'WinoGrande': 'Ann thanked Eve because Eve had helped.', 'ARC-e': 'Question: What is hot?\nAnswer: fire',
    'ARC-c': 'Question: What is cold?\nAnswer: ice', 'OBQA': 'The sun is a star',
    'SIQA': 'Q: Jan sang. Why?\nA: for joy', 'BoolQ': 'Cows eat grass.\nQuestion: do cows eat grass?\nAnswer: yes',
}


@pytest.fixture
def sets(tmp_path, monkeypatch):
    write_table_2(tmp_path)
    monkeypatch.chdir(tmp_path)
    return perplexity.eight_sets(limit=2)


@pytest.mark.slow
def test_questions_with_right_answers(sets):
    assert {label: set(texts) for label, texts in sets.items()} == {label: {text} for label, text in TEXTS.items()}
    assert all(len(texts) == 2 for texts in sets.values())


def test_perplexity():
    """A batch of texts of different lengths gives what each gives alone."""
    set_seed(0)
    model = AutoModelForCausalLM.from_config(LonghornConfig(
        hidden_size=16, num_hidden_layers=2, vocab_size=64, initializer_range=0.5, bos_token_id=None, eos_token_id=None,
    )).eval()
    texts = [torch.randint(64, (n,)) for n in (9, 3, 17, 5)]
    losses = []
    for ids in texts:
        log_p = model(ids[None]).logits[0].log_softmax(-1)
        losses += [-log_p[t, ids[t + 1]].item() for t in range(len(ids) - 1)]
    expected = math.exp(sum(losses) / len(losses))
    assert expected > 70
    for batch_size in (1, 3, 4):
        assert perplexity.perplexity(model, texts, batch_size) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_curve(sets, tmp_path):
    """Trained on the sets' own texts, two checkpoints and the end: the average falls with the tokens seen."""
    (tmp_path / 'text.txt').write_text('\n'.join(TEXTS.values()) * 40)
    (tmp_path / 'other.txt').write_text('\n'.join(TEXTS.values()))
    setting = {
        'title': 'tiny', 'text': {'files': ['text.txt', 'other.txt'], 'held_out_share': 0.5}, 'block_size': 32,
        'sequences_per_step': 4, 'model': {'bos_token_id': None, 'eos_token_id': None},
        'models': {'Longhorn, diagonal': {'model_type': 'longhorn', 'hidden_size': 16, 'num_hidden_layers': 1}},
        'training': {
            'max_steps': 30, 'per_device_train_batch_size': 4, 'learning_rate': 3e-2, 'eval_steps': 30, 'logging_steps': 30,
            'save_strategy': 'steps', 'save_steps': 10, 'use_cpu': True, 'disable_tqdm': True, 'dataloader_pin_memory': False,
        },
    }
    (tmp_path / 'setting.json').write_text(json.dumps(setting))
    output = tmp_path / 'out'
    language_modeling.main([
        str(tmp_path / 'setting.json'), '--output_dir', str(output), '--tokens_dir', str(tmp_path / 'tokens'),
    ])
    perplexity.main([str(output / 'results.json'), '--limit', '2'])
    report = json.loads((output / 'perplexity.json').read_text())
    run, = report['runs']
    assert [(x['step'], x['tokens']) for x in run['history']] == [(10, 1280), (20, 2560), (30, 3840)]
    assert all(set(x['sets']) == set(TEXTS) for x in run['history'])
    assert all(x['average'] == pytest.approx(sum(x['sets'].values()) / 8) for x in run['history'])
    averages = [x['average'] for x in run['history']]
    assert averages[0] > averages[1] > averages[2] > 1
    assert (output / 'perplexity.png').read_bytes().startswith(b'\x89PNG')
