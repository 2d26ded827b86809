"""Heads of other people around a base model with Longhorn."""

import copy
import warnings
from itertools import product

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.models.modeling_utils import FLAPreTrainedModel
from transformers import (
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from fla_longhorn.models.longhorn.modeling_longhorn import LonghornPreTrainedModel
from tests.devices import slow_but
from tests.integration.swapped import make_config
from tests.models.test_longhorn import small

T = 12


def text_config(family, **options):
    if family == 'longhorn':
        return small(**options)
    if family == 'hybrid':
        return small(attn={'layers': [1], 'num_heads': 2}, **options)
    return make_config(family, pad_token_id=0, **options)


class Score:
    """A head as people write it, which passes on what it does not know."""

    def build(self, config):
        self.backbone = AutoModel.from_config(config)
        self.score = nn.Linear(config.hidden_size, 3)

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        states = self.backbone(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        scores = self.score(states[:, -1])
        return SequenceClassifierOutput(loss=None if labels is None else F.cross_entropy(scores, labels), logits=scores)


def head(base):
    class Head(Score, base):
        if base is PreTrainedModel:
            config_class = PretrainedConfig
        if base in (PreTrainedModel, nn.Module):
            # as the sentence of the warning says
            accepts_loss_kwargs = False

        def __init__(self, config):
            super().__init__(*(() if base is nn.Module else (config,)))
            self.build(config)
            if base is not nn.Module:
                self.post_init()

    return Head


def generic(kind, base):
    # transformers chooses the loss by the name of the class
    name, own = kind.__name__.replace('Generic', 'Own'), {'base_model_prefix': 'model'}
    return type(name, (kind, base), {**own, 'accepts_loss_kwargs': False} if base is PreTrainedModel else own)


HEADS = {
    'FLAPreTrainedModel': head(FLAPreTrainedModel), 'PreTrainedModel': head(PreTrainedModel), 'Module': head(nn.Module),
    'sequences': generic(GenericForSequenceClassification, FLAPreTrainedModel),
    'tokens': generic(GenericForTokenClassification, FLAPreTrainedModel),
    'answers': generic(GenericForQuestionAnswering, FLAPreTrainedModel),
}
FAMILIES = ('longhorn', 'gla', 'hybrid', 'rwkv7')
FAST = {'FLAPreTrainedModel': 'longhorn', 'Module': 'gla', 'sequences': 'longhorn', 'answers': 'gla'}


def make_rows(name, n=4):
    rows = []
    for _ in range(n):
        row = {'input_ids': torch.randint(6, 53, (T,)), 'attention_mask': torch.ones(T, dtype=torch.long)}
        if 'answers' in name:
            row |= {'start_positions': torch.randint(T, ()), 'end_positions': torch.randint(T, ())}
        else:
            row['labels'] = torch.randint(3, (T,) if name == 'tokens' else ())
        rows.append(row)
    return rows


def make_trainer(model, rows, folder, size):
    options = TrainingArguments(
        str(folder), max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, optim='sgd',
        learning_rate=1.0, max_grad_norm=0.0, report_to='none', use_cpu=next(model.parameters()).device.type == 'cpu',
        save_strategy='no', disable_tqdm=True, remove_unused_columns=False,
    )
    return Trainer(model, options, train_dataset=rows, eval_dataset=rows)


@pytest.mark.parametrize(('name', 'family'), slow_but(FAST.items(), product(HEADS, FAMILIES)))
def test_head_in_the_trainer(name, family, device, tmp_path):
    """A step over two batches is that over one of their size; evaluation runs, and a checkpoint loads."""
    start, rows, steps = HEADS[name](text_config(family, num_labels=3)).to(device), make_rows(name), []
    for size in 4, 2:
        model = copy.deepcopy(start)
        trainer = make_trainer(model, rows, tmp_path, size)
        trainer.train()
        assert torch.isfinite(torch.tensor(trainer.evaluate()['eval_loss']))
        both = zip(model.parameters(), start.parameters(), strict=True)
        steps.append(torch.cat([(a - b).detach().flatten() for a, b in both]))
    assert steps[0].norm() > 0 and (steps[1] - steps[0]).norm() < 1e-4 * steps[0].norm()
    if isinstance(start, PreTrainedModel):
        model.eval().save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path, config=model.config).to(device).eval()
        batch = {key: x[None].to(device) for key, x in rows[0].items()}
        for a, b in zip(model(**batch).to_tuple(), again(**batch).to_tuple(), strict=True):
            assert not isinstance(a, torch.Tensor) or torch.equal(a, b)


@pytest.mark.parametrize('family', FAMILIES)
def test_num_items_in_a_base_model(family, device, recwarn):
    """It has no loss to divide, and says who has."""
    model, ids = AutoModel.from_config(text_config(family)).to(device), torch.randint(6, 53, (1, T), device=device)
    with pytest.warns(UserWarning, match='num_items_in_batch has no effect in .*Model.*accepts_loss_kwargs'):
        with_items = model(ids, num_items_in_batch=8).last_hidden_state
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert torch.equal(model(ids).last_hidden_state, with_items)


def test_own_head_averages_by_default():
    """A head on Longhorn's base class, as `LonghornForCausalLM` does not: it divides by the number of items."""
    from fla_longhorn import LonghornForCausalLM
    assert LonghornPreTrainedModel.accepts_loss_kwargs is False and LonghornForCausalLM.accepts_loss_kwargs is True
