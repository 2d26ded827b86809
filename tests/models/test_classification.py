"""Models that classify texts and tokens, and the lists by which transformers treats classes by name."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Event, local

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


@pytest.mark.parametrize('auto', [AutoModelForSequenceClassification, AutoModelForTokenClassification])
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


@pytest.mark.parametrize('name', ['paper', 'gla'])
def test_label_smoothing_of_the_trainer(name, device, tmp_path):
    """It shifts labels for classes that it knows by name; for others the target is the token that is read."""
    model, ids = make(name, device), torch.randint(3, 53, (2, 7), device=device)
    labels = ids.clone()
    labels[1, :3] = -100
    options = TrainingArguments(str(tmp_path), label_smoothing_factor=0.2, report_to='none', use_cpu=device.type == 'cpu')
    loss = Trainer(model, options).compute_loss(model, {'input_ids': ids, 'labels': labels})
    logits = model(ids).logits[:, :-1].double()
    expected = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize('mask', [None, 'left'])
@pytest.mark.parametrize('name', ['paper', 'hybrid', 'gla'])
def test_samples_between_steps_of_training(name, mask, device):
    """Activation checkpointing in training mode drops a cache; `generate` and calls that go on from one are right there."""
    model, ids = make(name, device), torch.randint(3, 53, (2, 6), device=device)
    mask = None if mask is None else torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6], device=device)
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = model.generate(ids, **options)
    model.gradient_checkpointing_enable()
    model.train()
    assert torch.equal(model.generate(ids, **options), expected)
    if mask is None:
        with torch.no_grad():
            cache = model(ids[:, :4], use_cache=True).past_key_values
        after = model(ids[:, 4:], past_key_values=cache).logits
        assert after.requires_grad
        whole = model(ids).logits[:, 4:]
        assert (after - whole).norm() < 1e-5 * whole.norm()
    assert sum(getattr(x, 'gradient_checkpointing', False) for x in model.modules()) >= 2


@pytest.mark.parametrize('order', [(0, 1), (1, 0)], ids=['the first ends first', 'the second ends first'])
@pytest.mark.parametrize('name', ['paper', 'gla'])
def test_two_threads_with_checkpoints(name, order, device):
    """Both calls with a cache, one in progress when the other begins, fill theirs; the blocks have their checkpoints again."""
    model, ids, thread = make(name, device).train(), torch.randint(3, 53, (1, 6), device=device), local()
    model.gradient_checkpointing_enable()
    begun, go_on = ([Event(), Event()] for _ in range(2))

    def hold(module, args):
        begun[thread.index].set()
        assert go_on[thread.index].wait(60)

    @torch.no_grad()
    def read(index):
        thread.index = index
        return model(ids, use_cache=True).past_key_values

    model.model.layers[0].register_forward_pre_hook(hold)
    with ThreadPoolExecutor() as pool:
        calls = []
        for i in (0, 1):
            calls.append(pool.submit(read, i))
            assert begun[i].wait(60)
        for i in order:
            go_on[i].set()
            assert len(calls[i].result()) == len(model.model.layers)
    assert all(block.gradient_checkpointing for block in model.model.layers)
