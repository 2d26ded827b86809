"""Recall by our rules and by zoology's: its sequences, its loss, what is told of a grid, and the baselines' formulas."""

import json

import pytest
import torch
import torch.nn.functional as F

from examples.mqar.data import BLANK, IGNORE
from lab.experiments import mqar, zoology
from lab.experiments.recall import best_runs, summarize

TASK = mqar.MQAR(vocab_size=64, seq_len=32, num_pairs=4)
CELL = mqar.DEFAULTS | {
    'mixer': 'diagonal', 'vocab_size': 64, 'seq_len': 32, 'num_pairs': 4, 'hidden_size': 16, 'num_hidden_layers': 2,
    'state_size': 4, 'tie_word_embeddings': True, 'initializer_range': 0.02, 'train_size': 40, 'test_size': 12, 'epochs': 4,
    'batch_size': 8, 'learning_rate': 1e-2, 'weight_decay': 0.1, 'embed_dropout': 0.1, 'stop_recall': 0.99, 'seed': 0,
}


def test_sequences(monkeypatch):
    """All keys are asked once, after all pairs; the label is the key's value, and the sequence does not show it again."""
    monkeypatch.setattr(zoology, 'DRAWN_AT_ONCE', 20)
    data = zoology.Sequences(TASK, 50, seed=0)
    assert len({tuple(row) for row in data.tokens.tolist()}) == len(data) == 50
    for row in data:
        tokens, labels = row['input_ids'].tolist(), row['labels'].tolist()
        values = dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))
        asked = [i for i, label in enumerate(labels) if label != IGNORE]
        assert len(asked) == len(values) == 4
        assert {tokens[i - 1]: labels[i] for i in asked} == values
        assert all(tokens[i] == BLANK for i in asked) and min(asked) > 8
        assert sum(token != BLANK for token in tokens) == 12


def test_forms():
    """A mixer's name says its form, whatever the example trains by default."""
    forms = {mixer: mqar.model_config(CELL | {'mixer': mixer}, TASK).exact for mixer in ('diagonal', 'exact', 'scalar beta')}
    assert forms == {'diagonal': False, 'exact': True, 'scalar beta': False}


@pytest.mark.parametrize('mixer', ['diagonal', 'attention', 'Mamba'])
def test_loss_at_the_queries(mixer, tmp_path):
    """Value and gradients are those of logits at every position."""
    cell = CELL | {'mixer': mixer, 'embed_dropout': 0.}
    model = mqar.build_model(cell, TASK)
    data = zoology.Sequences(TASK, 8, seed=0)
    trainer = zoology.build_trainer(model, cell, data, data, tmp_path)
    batch = torch.utils.data.default_collate([data[i] for i in range(8)])
    trainer.compute_loss(model, batch).backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids=batch['input_ids'], use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten(), ignore_index=IGNORE)
    loss.backward()
    for name, x in model.named_parameters():
        assert torch.allclose(gradients[name], x.grad, rtol=1e-4, atol=1e-6), name


def test_the_result_is_of_other_sequences(tmp_path, monkeypatch):
    """Neither training's nor those that stop it and choose the rate."""
    drawn, sequences = [], zoology.Sequences
    monkeypatch.setattr(zoology, 'Sequences', lambda *args: drawn.append(sequences(*args)) or drawn[-1])
    measured, recall = [], zoology.recall
    monkeypatch.setattr(zoology, 'recall', lambda model, data, *rest: measured.append((data, recall(model, data, *rest))) or
                        measured[-1][1])
    run = zoology.run_cell(CELL | {'seed': 7}, tmp_path, mqar.build_model)
    training, validation, test = drawn
    assert [data is validation for data, _ in measured] == [True] * 4 + [False]
    assert measured[-1][0] is test and run['recall'] == measured[-1][1]
    rows = [{tuple(row) for row in data.tokens.tolist()} for data in drawn]
    assert not rows[2] & (rows[0] | rows[1])


def test_the_rule():
    """One rate for all seeds, chosen by the mean on validation sequences; what is told is its recall on test sequences."""
    runs = [
        {'cell': {'mixer': mixer, 'seed': seed, 'learning_rate': rate}, 'history': [(1, 0.0), (2, validation)], 'recall': test}
        for mixer, seed, rate, validation, test in [
            # the best seed of the better rate on test sequences, and of each seed, is not what counts
            ('a', 0, 1e-3, 0.6, 0.4), ('a', 0, 1e-2, 0.3, 0.9), ('a', 1, 1e-3, 0.5, 0.2), ('a', 1, 1e-2, 0.7, 0.6),
            ('b', 0, 1e-3, 0.2, 0.2),
            # one seed of three does not make a mean
            ('c', 0, 1e-3, 0.5, 0.5), ('c', 1, 1e-3, 0.3, 0.3), ('c', 0, 1e-2, 0.9, 0.9),
        ]
    ]
    assert [{run['cell']['learning_rate'] for run in best_runs(runs) if run['cell']['mixer'] == x} for x in 'abc'] == [
        {1e-3}, {1e-3}, {1e-3}]
    told = summarize(runs, ['mixer'])
    assert [(x['mixer'], round(x['mean'], 9), x['lowest'], x['highest'], x['seeds']) for x in told] == [
        ('a', 0.3, 0.2, 0.4, 2), ('b', 0.2, 0.2, 0.2, 1), ('c', 0.4, 0.3, 0.5, 2)]


@pytest.mark.slow
def test_grid(tmp_path):
    setting = {
        'title': 'tiny', 'rules': 'zoology',
        'options': {key: x for key, x in CELL.items() if key not in ('mixer', 'learning_rate')},
        'grid': {'learning_rate': [1e-3, 1e-2], 'mixer': ['diagonal', 'attention']},
        'columns': ['mixer', 'learning_rate'], 'plot': {'x': 'step', 'panels': 'seq_len'},
    }
    path = tmp_path / 'tiny.json'
    path.write_text(json.dumps(setting))
    mqar.main([str(path), '--output_dir', str(tmp_path / 'out'), '--only', 'mixer=attention'])
    mqar.main([str(path), '--output_dir', str(tmp_path / 'out')])
    runs = json.loads((tmp_path / 'out/results.json').read_text())['runs']
    assert [run['cell']['mixer'] for run in runs] == 2 * ['attention'] + 2 * ['diagonal']
    assert all(len(run['history']) == 4 and 0 <= run['recall'] <= 1 for run in runs)
    with pytest.raises(SystemExit):
        mqar.main([str(path), '--output_dir', str(tmp_path / 'out'), '--only', 'learning_rate=0.1'])
