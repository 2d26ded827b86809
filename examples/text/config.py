"""Options of the command, its model and its training."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from examples.text.data import END
from fla_longhorn import LonghornConfig


@dataclass(frozen=True)
class RunArguments:
    files: list[str] = field(default_factory=lambda: ['descriptions'], metadata={
        'help': 'Patterns; `descriptions` are those of all installed packages, `stdlib` is the Python library.',
    })
    held_out_every: int = field(default=10, metadata={
        'help': 'One file in so many is held out; of fewer files, that share at the end of each.',
    })
    lengths: list[int] = field(default_factory=lambda: [256, 4096], metadata={
        'help': 'Bytes read at a time, beside 1,024, for the bits per held-out byte; longer than the text are left out.',
    })
    hidden_size: int = field(default=320, metadata={'help': 'Width of the model.'})
    num_hidden_layers: int = field(default=3, metadata={'help': 'Longhorn blocks.'})
    state_size: int = field(default=16, metadata={'help': 'Memory entries per channel.'})
    exact: bool = field(default=True, metadata={'help': 'The exact form; False for the diagonal one.'})
    steps: int = field(default=700, metadata={'help': 'Optimiser steps.'})
    batch_size: int = field(default=8, metadata={'help': 'Blocks in a step.'})
    block_size: int = field(default=256, metadata={'help': 'Bytes in a block.'})
    learning_rate: float = field(default=4e-3, metadata={'help': 'Peak learning rate of AdamW; it then falls along a cosine.'})
    seed: int = field(default=0, metadata={'help': 'Seed of the weights, the order of the blocks and the samples.'})
    prompts: list[str] = field(
        default_factory=lambda: ['The library ', '### Fixed\n\n- '], metadata={'help': 'Prompts to continue at the end.'},
    )
    max_new_tokens: int = field(default=400, metadata={'help': 'Most bytes to write after a prompt.'})
    temperature: float = field(default=0.6, metadata={'help': 'Of the sampling; 0 takes the likeliest byte.'})
    target_bits: float = field(default=2.2, metadata={'help': 'Bits per held-out byte above which the command fails.'})
    device: str = field(default='auto', metadata={'help': 'auto (the GPU where there is one), cpu or cuda.'})
    output_dir: str = field(default='outputs/text', metadata={'help': 'Where the checkpoint, its card and the figures go.'})

    def __post_init__(self) -> None:
        for name in ('hidden_size', 'num_hidden_layers', 'state_size', 'steps', 'batch_size', 'max_new_tokens'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} must be at least 1, got {getattr(self, name)}')
        for name in ('held_out_every', 'block_size'):
            if getattr(self, name) < 2:
                raise ValueError(f'{name} must be at least 2, got {getattr(self, name)}')
        if self.lengths and min(self.lengths) < 2:
            raise ValueError(f'lengths must be at least 2, got {self.lengths}')
        if self.temperature < 0:
            raise ValueError(f'temperature must be at least 0, got {self.temperature}')
        if self.device not in ('auto', 'cpu', 'cuda'):
            raise ValueError(f'device must be auto, cpu or cuda, got {self.device!r}')
        if self.device == 'cuda' and not torch.cuda.is_available():
            raise ValueError('device is cuda, but PyTorch sees no GPU; take auto or cpu')

    @property
    def use_cpu(self) -> bool:
        return self.device == 'cpu' or not torch.cuda.is_available()

    @property
    def writing(self) -> tuple[int, float, int]:
        return self.max_new_tokens, self.temperature, self.seed

    def model(self) -> LonghornConfig:
        return LonghornConfig(
            hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers, state_size=self.state_size,
            exact=self.exact, vocab_size=END + 1, bos_token_id=None, eos_token_id=END, pad_token_id=END,
            tie_word_embeddings=True,
        )

    def training(self) -> TrainingArguments:
        args = TrainingArguments(
            output_dir=self.output_dir,
            max_steps=self.steps,
            per_device_train_batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            lr_scheduler_type='cosine_with_min_lr',
            lr_scheduler_kwargs={'min_lr_rate': 0.1},
            warmup_steps=min(50, self.steps // 2),
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            seed=self.seed,
            use_cpu=self.use_cpu,
            logging_steps=10,
            save_strategy='no',
            dataloader_pin_memory=not self.use_cpu,
            disable_tqdm=True,
            report_to='none',
        )
        # one GPU is enough; the Trainer would use DataParallel over all visible GPUs
        args._n_gpu = min(args.n_gpu, 1)
        return args
