"""Training steps of several models, one of each in turn."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from benchmarks.measure import timing
from benchmarks.models.registry import Size, random_tokens


class Training:
    """A model's steps on random tokens: forward, backward and AdamW, on a GPU under bfloat16 autocast."""

    def __init__(self, model: PreTrainedModel, size: Size, device: torch.device):
        self.model, self.device = model.train(), device
        self.ids = random_tokens(size, size.batch_size, size.seq_len, device)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.losses: list[torch.Tensor] = []
        self.step()
        self.peak_bytes = timing.peak_bytes(self.step, device)

    def step(self) -> None:
        with torch.autocast('cuda', torch.bfloat16) if self.device.type == 'cuda' else nullcontext():
            loss = self.model(self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def figures(self, times: list[float]) -> dict:
        """Times, tokens a second and peak memory.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        if not torch.stack(self.losses).isfinite().all():
            raise FloatingPointError('the training loss is not finite')
        figures = timing.summarize(times)
        return figures | {'tokens_per_s': 1e3 * self.ids.numel() / figures['ms'], 'peak_bytes': self.peak_bytes}


def measure_training(
    models: dict[str, PreTrainedModel], size: Size, device: torch.device, seconds: float, errors: dict[str, str],
) -> dict[str, dict]:
    """Figures by name; if a model has none, the reason is put into `errors`."""
    trained = {}
    for name, model in models.items():
        with timing.noted(errors, name):
            trained[name] = Training(model, size, device)
    times = timing.take_turns({name: x.step for name, x in trained.items()}, device, seconds, errors)
    figures = {}
    for name, x in trained.items():
        with timing.noted(errors, name):
            if name not in errors:
                figures[name] = x.figures(times[name])
    return figures
