"""A model in onnxruntime beside the same model in PyTorch: tokens, logits and speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fla_longhorn.models import LonghornForCausalLM
from fla_longhorn_extras.onnx.generate import Model

# a share of the largest logit; both sum float32 products, each in its own order
TOLERANCE = 1e-4


@dataclass
class Comparison:
    """What :func:`compare` found."""

    prompt_tokens: int
    new_tokens: int
    # steps at which the most likely tokens differ
    different: list[int] = field(default_factory=list)
    # largest difference of two logits, over the largest logit
    difference: float = 0.0
    # seconds of the prompt and of all steps, by library
    prompt_seconds: dict[str, float] = field(default_factory=dict)
    decode_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not self.different and self.difference <= TOLERANCE

    def __str__(self) -> str:
        tokens = 'equal' if not self.different else f'different at {len(self.different)} steps, first {self.different[0]}'
        lines = [
            f'{self.new_tokens} greedy tokens {tokens}; logits differ by at most {self.difference:.1e} of the largest one '
            f'(allowed: {TOLERANCE:.0e})',
            f'{"tokens per second":20}{"prompt":>12}{"decoding":>12}',
        ]
        speeds = {
            name: (self.prompt_tokens / self.prompt_seconds[name], (self.new_tokens - 1) / self.decode_seconds[name])
            for name in self.prompt_seconds
        }
        lines += [f'{name:20}{prompt:12.1f}{decoding:12.1f}' for name, (prompt, decoding) in speeds.items()]
        first, second = speeds.values()
        return '\n'.join([*lines, f'{"ratio":20}{first[0] / second[0]:12.2f}{first[1] / second[1]:12.2f}'])


@torch.inference_mode()
def compare(
    model: LonghornForCausalLM, folder: str | os.PathLike, prompt_tokens: int = 64, new_tokens: int = 200, seed: int = 0,
) -> Comparison:
    """Let both read a prompt of random tokens, then the same greedy tokens, one by one, in turn and with as many threads."""
    found = Comparison(prompt_tokens, new_tokens)
    graph = Model(os.fspath(folder), torch.get_num_threads())
    generator = torch.Generator('cpu').manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (1, prompt_tokens), generator=generator, device='cpu')

    def in_pytorch(ids: torch.Tensor, cache: Any) -> tuple[np.ndarray, Any]:
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].numpy(), output.past_key_values

    def in_onnxruntime(ids: torch.Tensor, states: Any) -> tuple[np.ndarray, Any]:
        return graph(ids.numpy(), states)

    libraries: dict[str, Callable] = {'onnxruntime': in_onnxruntime, 'PyTorch': in_pytorch}
    starts = {'onnxruntime': graph.new_states(1), 'PyTorch': None}
    for name, read in libraries.items():
        # each library compiles and allocates here, before it is timed
        _, states = read(prompt, starts[name])
        read(prompt[:, :1], states)
    ids, states, seconds = prompt, dict(starts), found.prompt_seconds
    for i in range(new_tokens):
        logits = {}
        for name, read in libraries.items():
            started = time.perf_counter()
            logits[name], states[name] = read(ids, states[name])
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
        seconds = found.decode_seconds
        own, expected = logits.values()
        found.difference = max(found.difference, float(np.abs(own - expected).max() / np.abs(expected).max()))
        if own.argmax() != expected.argmax():
            found.different.append(i)
        ids = torch.from_numpy(expected.argmax(-1, keepdims=True))
    return found
