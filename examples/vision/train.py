"""Training a model of timm through transformers' `Trainer`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from timm.optim import param_groups_weight_decay
from transformers import (
    AutoModelForImageClassification,
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from examples.mqar.train import Progress
from examples.vision.config import RunArguments
from examples.vision.data import Digits


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {'accuracy': float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def train(name: str, seed: int, run: RunArguments, training: Digits, held_out: Digits) -> tuple[PreTrainedModel, list[float]]:
    """Train the row `name`; return the model and its held-out accuracy after each epoch."""
    set_seed(seed)
    model = AutoModelForImageClassification.from_config(run.model_config(name))
    groups = param_groups_weight_decay(model.timm_model, run.weight_decay, model.timm_model.no_weight_decay())
    args = TrainingArguments(
        output_dir=str(Path(run.output_dir) / 'trainer'),
        num_train_epochs=run.epochs,
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=run.batch_size,
        lr_scheduler_type='cosine',
        warmup_steps=0.1,
        max_grad_norm=1.0,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        eval_strategy='epoch',
        logging_strategy='epoch',
        save_strategy='no',
        # another core augments the next images meanwhile
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to='none',
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=training, eval_dataset=held_out, compute_metrics=accuracy,
        optimizers=(torch.optim.AdamW(groups, lr=run.learning_rate), None),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Progress('accuracy', f'{name}, seed {seed}'))
    trainer.train()
    return model, [x['eval_accuracy'] for x in trainer.state.log_history if 'eval_accuracy' in x]
