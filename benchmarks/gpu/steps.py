"""Training steps of a layer and of models of 120M and 360M: tokens a second and memory, beside fla's at equal width."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from fla.layers import GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention
from fla.models import GatedDeltaNetConfig, GLAConfig, KDAConfig
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

import fla_longhorn  # noqa: F401  registers
from benchmarks.gpu.passes import few_configurations, refusal
from benchmarks.models.registry import Size, wide_heads, with_mlp, without_mlp
from fla_longhorn.layers import Longhorn
from fla_longhorn.models import LonghornConfig

SIZES = {
    '120M': Size(768, 12, 64, 32000, 8, 2048, (), (2048,), 0),
    '360M': Size(1024, 24, 64, 32000, 8, 2048, (), (2048,), 0),
}
LAYER_WIDTH = 2048
REPEATS = 10

LAYERS: dict[str, Callable[[int], nn.Module]] = {
    'Longhorn, exact': lambda width: Longhorn(hidden_size=width, exact=True, layer_idx=0),
    'Longhorn, diagonal': lambda width: Longhorn(hidden_size=width, layer_idx=0),
    'Gated DeltaNet': lambda width: GatedDeltaNet(hidden_size=width, num_heads=width * 3 // 4 // 256, layer_idx=0),
    'KDA': lambda width: KimiDeltaAttention(hidden_size=width, num_heads=width // 128, layer_idx=0),
    'GLA': lambda width: GatedLinearAttention(hidden_size=width, num_heads=width // 512, layer_idx=0),
}
MODELS: dict[str, Callable[[Size], PreTrainedConfig]] = {
    'Longhorn, exact': lambda size: without_mlp(LonghornConfig, size, exact=True),
    'Longhorn, diagonal': lambda size: without_mlp(LonghornConfig, size),
    'Longhorn, exact, gate per head': lambda size: without_mlp(LonghornConfig, size, exact=True, gate='head'),
    'Longhorn, exact, gate per channel': lambda size: without_mlp(LonghornConfig, size, exact=True, gate='channel'),
    'Gated DeltaNet': lambda size: with_mlp(
        GatedDeltaNetConfig, size, num_heads=size.hidden_size * 3 // 4 // 256, head_dim=256,
    ),
    'KDA': lambda size: with_mlp(KDAConfig, size, num_heads=wide_heads(size), head_dim=128),
    'GLA': lambda size: with_mlp(GLAConfig, size, num_heads=wide_heads(size)),
}
# first, at both sizes
COMPARED = ('Longhorn, exact', 'GLA', 'Gated DeltaNet', 'Longhorn, diagonal')


def items(device: str) -> list[str]:
    others = [name for name in MODELS if name not in COMPARED]
    models = [f'{size}: {name}' for names in (COMPARED, others) for size in SIZES for name in names]
    return [*models, *(f'layer: {name}' for name in LAYERS)]


def run(item: str, device: str) -> Iterator[dict]:
    what, _, name = item.partition(': ')
    if reason := refusal(name):
        yield {'refused by fla': reason}
        return
    with few_configurations():
        yield from measure(what, name, device)


def measure(what: str, name: str, device: str) -> Iterator[dict]:
    step, tokens, parameters = (layer_step if what == 'layer' else model_step)(what, name, device)
    step()
    if device == 'meta':
        return
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        step()
    end.record()
    torch.cuda.synchronize()
    ms = start.elapsed_time(end) / REPEATS
    yield {
        'ms': ms, 'tokens_per_s': round(1e3 * tokens / ms), 'parameters': parameters,
        'gigabytes': round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def layer_step(_: str, name: str, device: str) -> tuple[Callable[[], object], int, int]:
    """Forward and backward of a layer in bfloat16, 8 x 2048 tokens."""
    with torch.device(device):
        layer = LAYERS[name](LAYER_WIDTH).bfloat16().train()
        x = torch.randn(8, 2048, LAYER_WIDTH, dtype=torch.bfloat16).requires_grad_()
    inputs = [x, *layer.parameters()]

    def step() -> object:
        y = layer(x)[0]
        # a parameter may be unused
        return torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)

    return step, x[..., 0].numel(), count(layer)


def model_step(what: str, name: str, device: str) -> tuple[Callable[[], object], int, int]:
    """Forward, backward and AdamW in bfloat16; without memory, of one layer, which has all the kernels."""
    size = SIZES[what]
    config = MODELS[name](size)
    if device == 'meta':
        config.num_hidden_layers = 1
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(size.vocab_size, (size.batch_size, size.seq_len))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        if device != 'meta':
            optimizer.step()
        optimizer.zero_grad()

    return step, ids.numel(), count(model)
