"""Longhorn in plain PyTorch: one loop over time, without kernels, fla or the Trainer.

    python -m lab.experiments plain lab/experiments/settings/mqar_depth.json [--steps 200]

It loads the weights of :class:`fla_longhorn.LonghornForCausalLM` by name and trains on the same batches. If the losses differ
by more than rounding, one of the two is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, set_seed

from benchmarks.measure.machine import describe_machine
from examples.mqar.config import RunArguments
from examples.mqar.data import IGNORE, MQAR, TrainingStream
from examples.mqar.train import build_trainer, train
from lab.experiments.mqar import build_model, chosen, grid_cells


class Mixer(nn.Module):
    """Section 3.3 of the paper in Mamba's block, for one head; `exact` is Theorem 3.1."""

    def __init__(self, width: int, state_size: int, channels: int, rank: int, conv_size: int, exact: bool) -> None:
        super().__init__()
        self.sizes, self.exact = [rank, state_size, state_size], exact
        self.in_proj = nn.Linear(width, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, conv_size, padding=conv_size - 1, groups=channels)
        self.x_proj = nn.Linear(channels, sum(self.sizes), bias=False)
        self.beta_proj = nn.Linear(rank, channels)
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = nn.Linear(channels, width, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """`[B, T, width]` to the same shape."""
        T = h.shape[1]
        x, z = self.in_proj(h).chunk(2, dim=-1)
        v = F.silu(self.conv1d(x.mT)[..., :T].mT)
        b, k, q = self.x_proj(v).split(self.sizes, dim=-1)
        beta = torch.sigmoid(self.beta_proj(b))
        eps = beta / (1 + beta * (k * k).sum(-1, keepdim=True))
        S = v.new_zeros(v.shape[0], v.shape[2], k.shape[2])
        outputs = []
        for t in range(T):
            # [B, channels, 1] and [B, 1, state_size]
            v_t, eps_t, k_t, q_t = v[:, t, :, None], eps[:, t, :, None], k[:, t, None], q[:, t, None]
            if self.exact:
                S = S + eps_t * (v_t - (S * k_t).sum(-1, keepdim=True)) * k_t
            else:
                S = (1 - eps_t * k_t**2) * S + eps_t * v_t * k_t
            outputs.append((S * q_t).sum(-1))
        return self.out_proj((torch.stack(outputs, 1) + self.D * v) * F.silu(z))


class Block(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.attn = Mixer(
            width, config.state_size, round(width * config.expand), math.ceil(width / 16), config.conv_size, config.exact,
        )

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.attn(self.attn_norm(h))


class PlainLonghorn(nn.Module):
    """A language model with the sizes of `config`, a `LonghornConfig` of one head, and the names of its weights."""

    def __init__(self, config) -> None:
        super().__init__()
        self.model = nn.ModuleDict({
            'embeddings': nn.Embedding(config.vocab_size, config.hidden_size),
            'layers': nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
            'norm': nn.RMSNorm(config.hidden_size, eps=config.norm_eps),
        })
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[B, T]` to logits `[B, T, vocabulary]`."""
        h = self.model['embeddings'](ids)
        for block in self.model['layers']:
            h = block(h)
        return self.lm_head(self.model['norm'](h))


def train_plain(
    model: PlainLonghorn, batches: Iterable[dict[str, torch.Tensor]], steps: int, learning_rate: float, warmup_steps: int,
    stop: int,
) -> list[float]:
    """The losses of the first `stop` steps: AdamW without decay, a warm-up, a cosine to zero over `steps`, clipping at 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.)
    losses = []
    for step, batch in zip(range(stop), batches, strict=False):
        share = (step - warmup_steps) / max(1, steps - warmup_steps)
        rate = step / warmup_steps if step < warmup_steps else (1 + math.cos(math.pi * share)) / 2
        for group in optimizer.param_groups:
            group['lr'] = learning_rate * rate
        logits = model(batch['input_ids'])[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch['labels'][:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        losses.append(loss.item())
    return losses


def curves(
    cell: dict, output: Path, steps: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,),
) -> dict[str | torch.dtype, list[float]]:
    """Losses over the first `steps` of a cell of `experiments mqar`: `'ours'`, through the Trainer, and this module's."""
    task = MQAR(**chosen(cell, MQAR))
    run = RunArguments(**chosen(cell, RunArguments), output_dir=str(output))
    set_seed(run.seed)
    model = build_model(cell, task)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    trainer = build_trainer(model, task, run)
    trainer.args.logging_steps = 1
    trainer.args.eval_strategy = 'no'
    trainer.add_callback(StopAfter(steps))
    train(trainer, run)
    found: dict[str | torch.dtype, list[float]] = {
        'ours': [x['loss'] for x in trainer.state.log_history if 'loss' in x],
    }
    for dtype in dtypes:
        plain = PlainLonghorn(model.config)
        plain.load_state_dict(weights)
        batches = DataLoader(TrainingStream(task, run.seed), batch_size=run.batch_size)
        found[dtype] = train_plain(
            plain.to(dtype), batches, run.steps, run.learning_rate, run.warmup_steps, stop=steps,
        )
    return found


class StopAfter(TrainerCallback):
    """Stop early, with the learning rate schedule of all steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.steps:
            control.should_training_stop = True


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.experiments plain', description=__doc__.splitlines()[0])
    parser.add_argument('setting', type=Path, help='setting of `experiments mqar`; trains the first cell of its grid')
    parser.add_argument('--steps', type=int, default=200, help='number of its first steps')
    parser.add_argument('--output_dir', type=Path, default=Path('outputs/plain'))
    options = parser.parse_args(args)
    cell = grid_cells(json.loads(options.setting.read_text()))[0]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ours, plain = curves(cell, options.output_dir / 'run', options.steps).values()
    largest = max(abs(x - y) for x, y in zip(ours, plain, strict=True))
    report = {'cell': cell, 'machine': describe_machine('cpu'), 'largest_difference': largest, 'ours': ours, 'plain': plain}
    (options.output_dir / 'results.json').write_text(json.dumps(report, indent=1) + '\n')
    print(f'{options.steps} steps: the largest difference of the losses is {largest:.1e}')
