"""Small language models on bytes of the descriptions of installed packages: loss by tokens, on equal tokens, seed by seed."""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from fla.models import GatedDeltaNetConfig, KDAConfig, Mamba2Config
from transformers import AutoModelForCausalLM, PreTrainedConfig

import fla_longhorn  # noqa: F401  registers
from benchmarks.gpu.passes import few_configurations, refusal
from benchmarks.gpu.steps import count
from benchmarks.models.registry import Size, mamba2, wide_heads, with_mlp, without_mlp
from fla_longhorn.models import LonghornConfig

# of about 30M parameters
SIZE = Size(512, 8, 64, 256, 16, 1024, (), (1024,), 0)
SEEDS = 3
STEPS, WARMUP, RATE = 400, 40, 1e-3
# one file in so many is held out
HELD_OUT = 10
EVALUATED = 8

MODELS: dict[str, Callable[[Size], PreTrainedConfig]] = {
    'Longhorn, exact': lambda size: without_mlp(LonghornConfig, size, exact=True),
    'Longhorn, exact, gate per channel': lambda size: without_mlp(LonghornConfig, size, exact=True, gate='channel'),
    'Longhorn, diagonal': lambda size: without_mlp(LonghornConfig, size),
    'Gated DeltaNet': lambda size: with_mlp(GatedDeltaNetConfig, size, num_heads=2, head_dim=192),
    'KDA': lambda size: with_mlp(KDAConfig, size, num_heads=wide_heads(size), head_dim=128),
    'Mamba-2': lambda size: mamba2(Mamba2Config, size),
}


def items(device: str) -> list[str]:
    return [f'{name}, seed {seed}' for seed in range(1 if device == 'meta' else SEEDS) for name in MODELS]


@cache
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on, and held-out ones."""
    files = sorted(Path(sysconfig.get_paths()['purelib']).glob('*.dist-info/METADATA'))
    parts = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files if file.stat().st_size]
    held = parts[HELD_OUT - 1::HELD_OUT]
    return torch.cat([x for i, x in enumerate(parts) if i % HELD_OUT != HELD_OUT - 1]), torch.cat(held or parts)


def run(item: str, device: str) -> Iterator[dict]:
    """A row now and then, with the held-out loss in bits of a byte."""
    name, _, seed = item.rpartition(', seed ')
    if reason := refusal(name):
        yield {'refused by fla': reason}
        return
    with few_configurations():
        yield from train(name, seed, device)


def train(name: str, seed: str, device: str) -> Iterator[dict]:
    torch.manual_seed(int(seed))
    config = MODELS[name](SIZE)
    if device == 'meta':
        config.num_hidden_layers = 1
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    train, held_out = texts()
    generator = torch.Generator().manual_seed(int(seed))

    def batch(text: torch.Tensor, generator: torch.Generator | None = generator) -> torch.Tensor:
        starts = torch.randint(len(text) - SIZE.seq_len, (SIZE.batch_size,), generator=generator)
        return torch.stack([text[i:i + SIZE.seq_len] for i in starts.tolist()]).long().to(device)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return model(ids, labels=ids, use_cache=False).loss

    started, steps = time.perf_counter(), 1 if device == 'meta' else STEPS
    for i in range(steps):
        scale = min((i + 1) / WARMUP, 1.0) * (1 - 0.9 * i / steps)
        for group in optimizer.param_groups:
            group['lr'] = RATE * scale
        loss_of(batch(train)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (i + 1) % max(steps // 4, 1) == 0:
            same = torch.Generator().manual_seed(0)
            model.eval()
            with torch.no_grad():
                loss = torch.stack([loss_of(batch(held_out, same)) for _ in range(EVALUATED)]).mean()
            model.train()
            yield {
                'tokens': (i + 1) * SIZE.batch_size * SIZE.seq_len,
                'bits_per_byte': None if loss.is_meta else loss.item() / math.log(2),
                'seconds': time.perf_counter() - started, 'parameters': count(model),
            }
