"""Recall by zoology's rules: its sequences, its rate and its decay, and a tiny grid."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.experiments import mqar, zoology
from examples.mqar.data import BLANK, IGNORE

TASK = mqar.MQAR(vocab_size=64, seq_len=32, num_pairs=4)
CELL = mqar.DEFAULTS | {
    'mixer': 'diagonal', 'vocab_size': 64, 'seq_len': 32, 'num_pairs': 4, 'hidden_size': 16, 'num_hidden_layers': 2,
    'state_size': 4, 'tie_word_embeddings': True, 'initializer_range': 0.02, 'train_size': 40, 'test_size': 12, 'epochs': 4,
    'batch_size': 8, 'learning_rate': 1e-2, 'weight_decay': 0.1, 'embed_dropout': 0.1, 'stop_recall': 0.99, 'seed': 0,
}


def test_sequences():
    """All keys are asked once, after all pairs; the label is the key's value, and the sequence does not show it again."""
    data = zoology.Sequences(TASK, 50, seed=0)
    for row in data:
        tokens, labels = row['input_ids'].tolist(), row['labels'].tolist()
        values = dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))
        asked = [i for i, label in enumerate(labels) if label != IGNORE]
        assert len(asked) == len(values) == 4
        assert {tokens[i - 1]: labels[i] for i in asked} == values
        assert all(tokens[i] == BLANK for i in asked) and min(asked) > 8
        assert sum(token != BLANK for token in tokens) == 12


def build(**options):
    cell = CELL | options
    model = AutoModelForCausalLM.from_config(mqar.model_config(cell, TASK))
    return model, cell


@pytest.mark.parametrize('mixer', ['diagonal', 'attention', 'Mamba'])
def test_loss_at_the_queries(mixer, tmp_path):
    """Value and gradients are those of logits at every position."""
    model, cell = build(mixer=mixer, embed_dropout=0.)
    trainer = zoology.build_trainer(model, cell, TASK, tmp_path)
    batch = torch.utils.data.default_collate([trainer.train_dataset[i] for i in range(8)])
    trainer.compute_loss(model, batch).backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids=batch['input_ids'], use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch['labels'][:, 1:].flatten(), ignore_index=IGNORE)
    loss.backward()
    for name, x in model.named_parameters():
        assert torch.allclose(gradients[name], x.grad, rtol=1e-4, atol=1e-6), name


def test_training(tmp_path):
    """Rate and decay of each step, dropout while training only, and the recall after each epoch."""
    model, cell = build()
    trainer = zoology.build_trainer(model, cell, TASK, tmp_path)
    rates = []
    trainer.create_optimizer()
    assert {group['weight_decay'] for group in trainer.optimizer.param_groups if group['params']} == {0.1}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda *args: (rates.append(trainer.optimizer.param_groups[0]['lr']), step(*args))[1]
    trainer.train()
    assert rates == pytest.approx([1e-2 * (1 + math.cos(math.pi * (i // 5) / 4)) / 2 for i in range(20)])
    assert [x['step'] for x in trainer.state.log_history if 'eval_recall' in x] == [5, 10, 15, 20]
    embed, ids = model.get_input_embeddings(), torch.arange(64)
    assert torch.equal(embed.eval()(ids), embed.weight)
    torch.manual_seed(0)
    zeros = (embed.train()(ids) == 0).float().mean().item()
    assert 0.05 < zeros < 0.15


def test_stops(tmp_path):
    """After the first epoch whose recall is above the threshold; any is above -1."""
    model, cell = build(stop_recall=-1)
    trainer = zoology.build_trainer(model, cell, TASK, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 5


def test_grid(tmp_path):
    setting = {
        'title': 'tiny', 'rules': 'zoology',
        'options': {key: x for key, x in CELL.items() if key not in ('mixer', 'learning_rate')},
        'grid': {'learning_rate': [1e-3, 1e-2], 'mixer': ['diagonal', 'attention']},
        'columns': ['mixer', 'learning_rate'], 'plot': {'x': 'step', 'panels': 'seq_len'},
    }
    path = tmp_path / 'tiny.json'
    path.write_text(json.dumps(setting))
    mqar.main([str(path), '--output_dir', str(tmp_path / 'out')])
    runs = json.loads((tmp_path / 'out/results.json').read_text())['runs']
    assert len(runs) == 4
    assert all(run['recall'] == run['history'][-1][1] for run in runs)
