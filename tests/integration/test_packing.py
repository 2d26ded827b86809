"""transformers' Trainer with its own collator for packed batches: the loss and the step of the documents one by one."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.devices import slow_but
from tests.models.test_boundaries import NAMES

TINY = {'hidden_size': 32, 'num_hidden_layers': 2, 'vocab_size': 53, 'initializer_range': 0.5}
HYBRID = {'attn': {'layers': [1], 'num_heads': 2, 'window_size': 6}}
FAMILIES = {
    'longhorn': {}, 'longhorn exact': {'exact': True, 'num_heads': 2}, 'longhorn hybrid': HYBRID,
    'gla': {'attn_mode': 'longhorn', 'num_heads': 2}, 'gla hybrid': {'attn_mode': 'longhorn', 'num_heads': 2, **HYBRID},
}


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found = {name: x.grad.clone() for name, x in model.named_parameters()}


def one_by_one(model, rows: list[dict]) -> torch.Tensor:
    """The mean of the documents' own next tokens."""
    rows = [row['input_ids'].to(model.device) for row in rows]
    losses = [F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction='sum') for row in rows]
    return sum(losses) / sum(len(row) - 1 for row in rows)


@pytest.mark.parametrize(('family', 'names'), slow_but(zip(FAMILIES, NAMES, strict=True), product(FAMILIES, NAMES)))
def test_trainer(family, names, tmp_path, device):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **TINY, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).to(device)
    rows = [{'input_ids': torch.randint(3, 53, (length,))} for length in (9, 2, 30, 5)]
    want = one_by_one(model.train(), rows)
    want.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    callback = Gradients()
    trainer = Trainer(
        model=model, train_dataset=rows, eval_dataset=rows, callbacks=[callback],
        data_collator=DataCollatorWithFlattening(return_tensors='pt', **NAMES[names]),
        args=TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=1,
            use_cpu=device.type == 'cpu', logging_steps=1, max_grad_norm=0, report_to='none', disable_tqdm=True,
            save_strategy='no',
        ),
    )
    assert trainer.evaluate()['eval_loss'] == pytest.approx(want.item(), rel=1e-5)
    trainer.train()
    (loss,) = (entry['loss'] for entry in trainer.state.log_history if 'loss' in entry)
    assert loss == pytest.approx(want.item(), rel=1e-4)
    errors = {name: ((callback.found[name] - x).norm() / x.norm()).item() for name, x in gradients.items()}
    assert max(errors.values()) <= 1e-4, errors
