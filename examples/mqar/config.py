"""Options of the command: the model, the training and the run. The task's own options are in `data.py`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from examples.mqar.data import MQAR
from fla_longhorn import LonghornConfig


@dataclass(frozen=True)
class ModelArguments:
    hidden_size: int = field(default=128, metadata={'help': 'Width of the model.'})
    num_hidden_layers: int = field(default=1, metadata={'help': 'Longhorn blocks; one is enough, and learns soonest.'})
    state_size: int = field(default=32, metadata={'help': 'Memory entries per channel.'})
    expand: int = field(default=2, metadata={'help': 'Channels of a mixer as a multiple of the width.'})
    num_heads: int = field(default=1, metadata={'help': 'Groups of channels with their own keys and queries.'})
    exact: bool = field(default=True, metadata={'help': 'The exact form; False for the diagonal one.'})

    @property
    def form(self) -> str:
        return 'exact' if self.exact else 'diagonal'

    def config(self, task: MQAR) -> LonghornConfig:
        """The model, without special tokens: a blank is an ordinary token.

        Keys are never answers, so a tied head pushes the embeddings of all keys in one direction, and the model cannot tell
        them apart. Untied, it starts to recall within some hundred steps, sooner with larger embeddings.
        """
        return LonghornConfig(
            hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers, state_size=self.state_size,
            expand=self.expand, num_heads=self.num_heads, exact=self.exact, vocab_size=task.vocab_size, bos_token_id=None,
            eos_token_id=None, max_position_embeddings=task.seq_len, tie_word_embeddings=False, initializer_range=0.1,
        )


@dataclass(frozen=True)
class RunArguments:
    steps: int = field(default=1000, metadata={'help': 'Most optimiser steps.'})
    batch_size: int = field(default=128, metadata={'help': 'Sequences in a step; large ones start the learning.'})
    learning_rate: float = field(default=5e-3, metadata={'help': 'Peak learning rate.'})
    warmup_steps: int = field(default=50, metadata={'help': 'Steps until the peak; it then falls along a cosine.'})
    weight_decay: float = field(default=0.0, metadata={'help': 'Weight decay of AdamW.'})
    seed: int = field(default=0, metadata={'help': 'Seed of the weights and of all data.'})
    device: str = field(default='auto', metadata={'help': 'auto (the GPU where there is one), cpu or cuda.'})
    eval_steps: int = field(default=50, metadata={'help': 'Steps between two measurements of the held-out recall.'})
    eval_size: int = field(default=512, metadata={'help': 'Held-out sequences in such a measurement.'})
    test_size: int = field(default=4096, metadata={'help': 'Other held-out sequences, for the recall at the end.'})
    test_size_per_count: int = field(default=512, metadata={'help': 'And for each number of pairs.'})
    target_recall: float = field(default=0.99, metadata={'help': 'Recall at the end below which the command fails.'})
    stop_recall: float = field(default=0.995, metadata={'help': 'Stop once the held-out recall has been this good ...'})
    stop_patience: int = field(default=2, metadata={'help': '... for so many measurements in a row; 0 runs all steps.'})
    both: bool = field(default=False, metadata={'help': 'Train the other form too, to draw it beside the first.'})
    num_questions: int = field(default=6, metadata={'help': 'Held-out queries to answer by `generate` at the end.'})
    output_dir: str = field(default='outputs/mqar', metadata={'help': 'Where picture, figures and checkpoint go.'})
    save_steps: int = field(default=0, metadata={'help': 'Steps between two training checkpoints; 0 for none.'})
    resume: bool = field(default=False, metadata={'help': 'Go on from the last training checkpoint of this folder.'})

    def __post_init__(self) -> None:
        for name in ('steps', 'batch_size', 'eval_steps', 'eval_size', 'test_size', 'test_size_per_count'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}')
        for name in ('target_recall', 'stop_recall'):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f'{name} must be between 0 and 1, got {getattr(self, name)}')
        if self.device not in ('auto', 'cpu', 'cuda'):
            raise ValueError(f'device must be auto, cpu or cuda, got {self.device!r}')
        if self.resume and not (os.path.isdir(self.trainer_dir) and get_last_checkpoint(self.trainer_dir)):
            raise ValueError(f'resume needs a training checkpoint in {self.trainer_dir}; save_steps writes them')
        if self.device == 'cuda' and not torch.cuda.is_available():
            raise ValueError('device is cuda, but PyTorch sees no GPU; take auto or cpu')

    @property
    def trainer_dir(self) -> str:
        return os.path.join(self.output_dir, 'trainer')

    def training_arguments(self) -> TrainingArguments:
        args = TrainingArguments(
            output_dir=self.trainer_dir,
            max_steps=self.steps,
            per_device_train_batch_size=self.batch_size,
            per_device_eval_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            lr_scheduler_type='cosine',
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            max_grad_norm=1.0,
            seed=self.seed,
            use_cpu=self.device == 'cpu' or not torch.cuda.is_available(),
            eval_strategy='steps',
            eval_steps=self.eval_steps,
            logging_steps=10,
            save_strategy='steps' if self.save_steps else 'no',
            save_steps=self.save_steps or self.steps,
            include_num_input_tokens_seen='no',
            dataloader_pin_memory=torch.cuda.is_available() and self.device != 'cpu',
            disable_tqdm=True,
            report_to='none',
        )
        # one GPU is enough; the Trainer would use DataParallel over all visible GPUs
        args._n_gpu = min(args.n_gpu, 1)
        return args
