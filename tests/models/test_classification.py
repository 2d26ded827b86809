"""Models that classify texts and tokens, and the lists by which transformers treats classes by name."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from fla_longhorn import LonghornForSequenceClassification, LonghornForTokenClassification
from tests.models.test_cache import make
from tests.models.test_longhorn import small


@pytest.mark.parametrize('side', ['left', 'right'])
def test_score_of_the_last_token(side, device):
    model = AutoModelForSequenceClassification.from_config(small(num_labels=3)).to(device).eval()
    assert isinstance(model, LonghornForSequenceClassification)
    rows = [torch.randint(3, 53, (n,), device=device) for n in (4, 9, 1)]
    apart = torch.cat([model.score(model.model(x[None]).last_hidden_state[:, -1]) for x in rows])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    labels = torch.tensor([0, 2, 1], device=device)
    output = model(ids, attention_mask=(ids != 0).long(), labels=labels)
    assert (output.logits - apart).norm() < 1e-5 * apart.norm()
    assert output.loss.item() == pytest.approx(F.cross_entropy(apart.double(), labels).item(), rel=1e-5)


def test_score_of_each_token(device, tmp_path):
    model = AutoModelForTokenClassification.from_config(small(num_labels=5)).to(device).eval()
    ids = torch.randint(3, 53, (2, 7), device=device)
    output = model(ids, labels=ids % 5)
    assert output.logits.shape == (2, 7, 5)
    expected = F.cross_entropy(output.logits.flatten(0, 1).double(), (ids % 5).flatten())
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path).to(device)
    assert isinstance(loaded, LonghornForTokenClassification) and torch.equal(loaded(ids).logits, output.logits)


@pytest.mark.parametrize('auto', [
    AutoModelForSequenceClassification, pytest.param(AutoModelForTokenClassification, marks=pytest.mark.slow),
])
def test_in_the_trainer(auto, device, tmp_path):
    """A step over two batches is that over one of their size; evaluation and prediction run."""
    start = auto.from_config(small(num_labels=3, classifier_dropout=0.0)).to(device)
    labels = torch.randint(3, (8, 6) if auto is AutoModelForTokenClassification else (8,))
    rows = [{'input_ids': torch.randint(3, 53, (6,)), 'labels': label} for label in labels]
    steps = []
    for size, batches in ((8, 1), (4, 2)):
        model = copy.deepcopy(start)
        options = TrainingArguments(
            str(tmp_path), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=batches, optim='sgd',
            learning_rate=1.0, max_grad_norm=0.0, report_to='none', use_cpu=device.type == 'cpu', save_strategy='no',
        )
        trainer = Trainer(model, options, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        assert torch.tensor(trainer.evaluate()['eval_loss']).isfinite() and len(trainer.predict(rows).predictions) == 8
        steps.append(torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), start.parameters(), strict=True)]))
    assert (steps[1] - steps[0]).norm() <= 1e-4 * steps[0].norm()


@pytest.mark.parametrize('name', ['paper', 'hybrid', 'gla'])
def test_samples_between_steps_of_training(name, device):
    """Activation checkpointing in training has no cache, as in transformers: `generate` reads all again, and says so."""
    model, ids = make(name, device), torch.randint(3, 53, (2, 6), device=device)
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = model.generate(ids, **options)
    cache = model(ids, use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.warns(UserWarning, match='use_cache=True is set to False with gradient checkpointing'):
        assert torch.equal(model.generate(ids, **options), expected)
    with pytest.warns(UserWarning, match='use_cache=True is set to False'):
        assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match='past_key_values must be None with gradient checkpointing'):
        model(ids, past_key_values=cache)
