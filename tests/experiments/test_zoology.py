"""Recall by zoology's rules: its sequences, its rate and its decay, and a tiny grid."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from examples.mqar.data import BLANK, IGNORE
from experiments import mqar, zoology
from experiments.baselines import MIXERS, RWKV4, long_convolution, taylor

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
    mqar.main([str(path), '--output_dir', str(tmp_path / 'out')])
    runs = json.loads((tmp_path / 'out/results.json').read_text())['runs']
    assert len(runs) == 4
    assert all(len(run['history']) == 4 and 0 <= run['recall'] <= 1 for run in runs)


def test_an_unfinished_grid_is_drawn(tmp_path):
    begun = ((16, 'diagonal'), (16, 'exact'), (32, 'exact'))
    cells = [CELL | {'mixer': mixer, 'hidden_size': width} for width, mixer in begun]
    runs = [{'cell': cell, 'history': [(5, 0.1), (10, 0.2)], 'recall': 0.2} for cell in cells]
    setting = {'title': 'tiny', 'plot': {'x': 'step', 'panels': 'hidden_size'}}
    mqar.draw({'setting': setting, 'runs': runs}, tmp_path / 'grid.png')
    assert (tmp_path / 'grid.png').stat().st_size > 0


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


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    """As if it had not been: weights, optimizer, order and dropout."""
    whole = zoology.run_cell(CELL, tmp_path / 'whole', mqar.build_model)
    evaluate, steps = zoology.RecallTrainer.evaluate, []

    def interrupted(self, *args, **kwargs):
        steps.append(self.state.global_step)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(zoology.RecallTrainer, 'evaluate', interrupted)
    with pytest.raises(KeyboardInterrupt):
        zoology.run_cell(CELL, tmp_path, mqar.build_model)
    run = zoology.run_cell(CELL, tmp_path, mqar.build_model)
    assert steps == [5, 10, 15, 15, 20]
    for result in (whole, run):
        assert result.pop('seconds') > 0
    assert run == whole
    # another cell begins at its own start
    assert not list(tmp_path.glob('run-*'))


@pytest.mark.parametrize('mixer', MIXERS)
def test_baselines_take_a_step(mixer, tmp_path):
    model = mqar.build_model(CELL | {'mixer': mixer, 'hidden_size': 16}, TASK)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = torch.randint(64, (2, 32))
    with torch.no_grad():
        logits, changed = model(ids), model(torch.cat([ids[:, :20], ids[:, 20:].flip(1)], dim=1))
    assert torch.allclose(logits[:, :20], changed[:, :20], atol=1e-5)
    cell = CELL | {'mixer': mixer, 'epochs': 1, 'train_size': 16}
    trainer = zoology.build_trainer(model, cell, TASK, tmp_path)
    before = {name: x.clone() for name, x in model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    assert all(not torch.equal(x, before[name]) for name, x in model.named_parameters())


@pytest.mark.parametrize('mixer', mqar.OTHERS)
def test_models_of_fla_are_built(mixer):
    """Two layers without an MLP, as wide as Longhorn's, for those too whose kernels run on a GPU only."""
    with torch.device('meta'):
        model = mqar.build_model(CELL | {'mixer': mixer, 'hidden_size': 64, 'num_hidden_layers': 2}, TASK)
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.vocab_size) == (64, 2, 64)
    assert model.config.tie_word_embeddings
    assert not any('.mlp.' in name for name, _ in model.named_parameters())
    assert mqar.needs_gpu({'mixer': mixer}) == (mixer != 'Mamba')


def test_what_needs_a_gpu_is_said_to(tmp_path, capsys, monkeypatch):
    setting = {
        'title': 'tiny', 'rules': 'zoology', 'options': {key: x for key, x in CELL.items() if key != 'mixer'} | {'epochs': 1},
        'grid': {'mixer': ['BaseConv', 'KDA']}, 'columns': ['mixer'], 'plot': {'x': 'step', 'panels': 'seq_len'},
    }
    (tmp_path / 'tiny.json').write_text(json.dumps(setting))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    mqar.main([str(tmp_path / 'tiny.json'), '--output_dir', str(tmp_path / 'out')])
    assert '[2/2] mixer KDA: not run, its kernels need a GPU' in capsys.readouterr().out
    runs = json.loads((tmp_path / 'out/results.json').read_text())['runs']
    assert [run['cell']['mixer'] for run in runs] == ['BaseConv']


def test_taylor_features():
    """Products of features are the first terms of the exponential."""
    q, k = torch.randn(2, 5, 8, dtype=torch.float64)
    scores = (q * k).sum(-1) / 8**0.5
    assert torch.allclose((taylor(q) * taylor(k)).sum(-1), 1 + scores + scores**2 / 2)


def test_long_convolution():
    x, taps = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    y = torch.stack([sum(taps[s] * x[:, t - s] for s in range(t + 1)) for t in range(7)], dim=1)
    assert torch.allclose(long_convolution(x, taps), y)


def test_rwkv_is_a_weighted_mean():
    """Of all values, by `exp(k)`, a decay `exp(-exp(decay))` a token, and a weight of its own for the newest."""
    mixer = RWKV4(6, 5, 1).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    before = F.pad(x, (0, 0, 1, -1))
    k = mixer.key(x * mixer.mix_k + before * (1 - mixer.mix_k))
    v = mixer.value(x * mixer.mix_v + before * (1 - mixer.mix_v))
    r = mixer.receptance(x * mixer.mix_r + before * (1 - mixer.mix_r))
    means = []
    for t in range(5):
        weights = [(k[:, s] - (t - 1 - s) * mixer.decay.exp()).exp() for s in range(t)] + [(mixer.first + k[:, t]).exp()]
        means.append(sum(w * v[:, s] for s, w in enumerate(weights)) / sum(weights))
    assert torch.allclose(mixer(x), mixer.output(torch.sigmoid(r) * torch.stack(means, 1)))
