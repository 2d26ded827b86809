"""Training through transformers' `Trainer`, with a progress bar and early stopping."""

from __future__ import annotations

import torch
from tqdm.auto import tqdm
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

from examples.mqar.config import RunArguments
from examples.mqar.data import MQAR, HeldOut, TrainingStream
from examples.mqar.evaluate import right_answers


class Progress(TrainerCallback):
    """One bar, with an optional name before it and the latest loss and held-out metric after it."""

    def __init__(self, metric: str = 'recall', name: str | None = None):
        self.metric, self.name = metric, name

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = tqdm(
            total=state.max_steps, initial=state.global_step, desc=self.name, unit='step', dynamic_ncols=True,
        )
        self.shown = {}

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        for key, name in (('loss', 'loss'), (f'eval_{self.metric}', f'held-out {self.metric}')):
            if key in logs:
                self.shown[name] = f'{logs[key]:.3f}'
        self.bar.set_postfix(self.shown)

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()


class StopWhenLearned(TrainerCallback):
    """Stop after `patience` evaluations in a row with a recall of at least `recall`."""

    def __init__(self, recall: float, patience: int):
        self.recall, self.patience = recall, patience

    def on_evaluate(self, args, state, control, **kwargs):
        recalls = [entry['eval_recall'] for entry in state.log_history if 'eval_recall' in entry][-self.patience:]
        if len(recalls) == self.patience and min(recalls) >= self.recall:
            control.should_training_stop = True


def likeliest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The likeliest next token `[B, T]`, to keep instead of logits `[B, T, vocabulary]`."""
    return logits.argmax(dim=-1)


def recall(prediction: EvalPrediction) -> dict[str, float]:
    """The share of queries that are answered right."""
    return {'recall': float(right_answers(prediction.predictions, prediction.label_ids).mean())}


def build_trainer(
    model: PreTrainedModel, task: MQAR, run: RunArguments, trainer_class: type[Trainer] = Trainer,
) -> Trainer:
    """A `Trainer` for any causal language model."""
    trainer = trainer_class(
        model=model,
        args=run.training_arguments(),
        train_dataset=TrainingStream(task, run.seed),
        eval_dataset=HeldOut(task, run.eval_size, (run.seed, 0)),
        data_collator=default_data_collator,
        compute_metrics=recall,
        preprocess_logits_for_metrics=likeliest,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress)
    if run.stop_patience:
        trainer.add_callback(StopWhenLearned(run.stop_recall, run.stop_patience))
    return trainer


def train(trainer: Trainer, run: RunArguments) -> None:
    """Train, or continue from the last training checkpoint; the log is in the Trainer's state."""
    checkpoint = get_last_checkpoint(trainer.args.output_dir) if run.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
