"""Multi-query associative recall by the rules of zoology's Figure 2 (arXiv 2312.04927), which the paper's Fig. 4 follows.

Differences from `examples/mqar`: a fixed set of training sequences, read for `epochs` epochs; each sequence has all
`num_pairs` pairs; the token after a query is blank, so that no answer is ever shown; AdamW decays every parameter; the rate
falls along a cosine, epoch by epoch, without a warm-up; gradients are not clipped; embeddings have dropout and are tied to the
head; training stops once the recall passes `stop_recall`, or early after `last_epoch` of the planned `epochs`. zoology
reports the recall on the sequences that stop the training and select the learning rate. Here those are validation sequences,
and the result is the recall on as many others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from examples.mqar.data import BLANK, IGNORE, MQAR, draw
from examples.mqar.train import Progress

DRAWN_AT_ONCE = 1000


class Sequences(Dataset):
    """`size` sequences with all pairs of `task`: `input_ids`, and `labels` that are compared with the token before."""

    def __init__(self, task: MQAR, size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        counts = np.full(size, task.num_pairs)
        # a draw takes memory for every key and value of each sequence
        parts = [draw(task, counts[i:i + DRAWN_AT_ONCE], rng) for i in range(0, size, DRAWN_AT_ONCE)]
        tokens, labels = (np.concatenate(x) for x in zip(*parts, strict=True))
        tokens[labels != IGNORE] = BLANK
        self.tokens, self.labels = torch.from_numpy(tokens), torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {'input_ids': self.tokens[i], 'labels': self.labels[i]}


def answers(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[Q, vocabulary]` at the Q queries of a batch, and the values `[Q]` that are right."""
    asked = batch['labels'][:, 1:] != IGNORE
    hidden = model.base_model(input_ids=batch['input_ids'], use_cache=False)[0]
    return model.get_output_embeddings()(hidden[:, :-1][asked]), batch['labels'][:, 1:][asked]


class QueryTrainer(Trainer):
    """Computes logits at the queries only in training: the same loss and gradients with a fraction of the work."""

    answers = staticmethod(answers)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return F.cross_entropy(*self.answers(model, inputs))


class RecallTrainer(QueryTrainer):
    """Decay of every parameter; a rate that falls epoch by epoch; recall at the end of each."""

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        epochs = int(self.args.num_train_epochs)
        steps = num_training_steps // epochs
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: (1 + math.cos(math.pi * (step // steps) / epochs)) / 2,
        )
        return self.lr_scheduler

    def train(self, *args, **kwargs):
        self.since = time.process_time()
        return super().train(*args, **kwargs)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        metrics = {'eval_recall': recall(self.model, self.eval_dataset, self.args.eval_batch_size, self.answers)}
        now = time.process_time()
        self.log(metrics | {'eval_seconds': now - self.since})
        self.since = now
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


@torch.no_grad()
def recall(model: torch.nn.Module, data: Dataset, batch_size: int, answers: Callable = answers) -> float:
    """The share of queries that `model` answers right; leaves it in training mode."""
    model.eval()
    right, device = [], next(model.parameters()).device
    for batch in DataLoader(data, batch_size=batch_size):
        logits, values = answers(model, {name: x.to(device) for name, x in batch.items()})
        right.append(logits.argmax(-1) == values)
    model.train()
    return torch.cat(right).float().mean().item()


class StopAbove(TrainerCallback):
    """Stop once the recall is above `recall`, or after `last_epoch`."""

    def __init__(self, recall: float, last_epoch: int) -> None:
        self.recall, self.last_epoch = recall, last_epoch

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics['eval_recall'] > self.recall or round(state.epoch) >= self.last_epoch:
            control.should_training_stop = True


def build_trainer(
    model: torch.nn.Module, cell: dict, data: Dataset, held_out: Dataset, output: Path,
    trainer_class: type[RecallTrainer] = RecallTrainer,
) -> RecallTrainer:
    arguments = TrainingArguments(
        output_dir=str(output), num_train_epochs=cell['epochs'], per_device_train_batch_size=cell['batch_size'],
        per_device_eval_batch_size=cell['batch_size'], learning_rate=cell['learning_rate'], weight_decay=cell['weight_decay'],
        max_grad_norm=0., seed=cell['seed'], eval_strategy='epoch',
        # plain modules have tied weights, which Trainer cannot save
        save_strategy='epoch' if isinstance(model, PreTrainedModel) else 'no', save_total_limit=1,
        logging_steps=min(10, -(-cell['train_size'] // cell['batch_size'])), disable_tqdm=True, report_to='none',
        use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(), remove_unused_columns=False,
    )
    dropout = torch.nn.Dropout(cell['embed_dropout'])
    embeddings = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding))
    embeddings.register_forward_hook(lambda module, _, out: dropout.train(module.training)(out))
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=data, eval_dataset=held_out,
        callbacks=[Progress, StopAbove(cell['stop_recall'], cell.get('last_epoch', cell['epochs']))],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_cell(cell: dict, folder: Path, build_model: Callable) -> dict:
    """Train `build_model(cell, task)` by these rules; an interrupted run continues after its last epoch."""
    task = MQAR(**{name: cell[name] for name in ('vocab_size', 'seq_len', 'num_pairs', 'power_a') if name in cell})
    set_seed(cell['seed'])
    model = build_model(cell, task)
    data, held_out, test = (Sequences(task, size, 3 * cell['seed'] + i) for i, size in enumerate(
        (cell['train_size'], cell['test_size'], cell['test_size']),
    ))
    trainer = build_trainer(model, cell, data, held_out, folder)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.exists() else None)
    log = trainer.state.log_history
    epochs = [x for x in log if 'eval_recall' in x]
    return {
        'cell': cell, 'parameters': model.num_parameters(), 'history': [(x['step'], x['eval_recall']) for x in epochs],
        'loss': [x['loss'] for x in log if 'loss' in x][-1], 'recall': recall(model, test, cell['batch_size']),
        'seconds': sum(x['eval_seconds'] for x in epochs),
    }
