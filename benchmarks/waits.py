"""Host-device synchronisations, launches and allocations of a decoded token and a training step, on the pretend device.

    python -m offgpu.pretend.build
    python -m benchmarks waits [--json FILE]

Eager models of four layers: Longhorn, fla's GLA and DeltaNet. A launch is a Triton kernel or a PyTorch operator that runs on
the device. The JSON names where each wait occurs, also those in fla's own code.
"""

from __future__ import annotations

import sys

from offgpu import pretend

if 'torch' not in sys.modules:
    pretend.install()

import argparse  # noqa: E402  the device comes before torch
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from fla.models import DeltaNetConfig, GLAConfig  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from benchmarks.measure import timing  # noqa: E402
from fla_longhorn import LonghornConfig  # noqa: E402

SIZES: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=4, vocab_size=128)
MODELS = {
    'Longhorn': lambda: LonghornConfig(**SIZES),
    'Longhorn exact': lambda: LonghornConfig(**SIZES, exact=True),
    'Longhorn, one layer attention': lambda: LonghornConfig(**SIZES, attn={'layers': [1], 'num_heads': 2}),
    'GLA': lambda: GLAConfig(**SIZES, num_heads=2),
    'DeltaNet': lambda: DeltaNetConfig(**SIZES, num_heads=2),
}
T = 16


def padded(B: int, columns: int) -> torch.Tensor:
    mask = torch.ones(B, columns, dtype=torch.int64, device='cuda')
    mask[0, :2] = 0
    return mask


def count(run: Callable[[], Any]) -> dict[str, Any]:
    """Counts of the second call, after fla's caches are filled."""
    run()
    with pretend.counted() as counts:
        run()
    return {
        'waits': counts.syncs.total(), 'launches': counts.launches.total() + counts.ops.total(),
        'allocations': counts.allocations, 'where': dict(counts.stacks),
    }


def decoded_token(model: Any, with_mask: bool) -> dict[str, Any]:
    ids = torch.randint(3, 128, (2, T), device='cuda')
    with torch.no_grad():
        cache = model.eval()(ids, attention_mask=padded(2, T) if with_mask else None, use_cache=True).past_key_values
        masks = [padded(2, T + n) if with_mask else None for n in (1, 2)]
        return count(lambda: model(ids[:, :1], attention_mask=masks.pop(0), past_key_values=cache, use_cache=True))


def training_step(model: Any, name: str) -> dict[str, Any]:
    def run() -> None:
        ids = torch.randint(3, 128, (1, 2 * T) if name.startswith('cu_seqlens') else (2, T), device='cuda')
        kwargs: dict[str, Any] = {}
        if name == 'mask':
            kwargs['attention_mask'] = padded(2, T)
        elif name != 'plain':
            bounds = torch.tensor([0, 5, 2 * T])
            kwargs['cu_seqlens'] = bounds.to('cuda', non_blocking=True)
            if name == 'cu_seqlens and a copy':
                kwargs['cu_seqlens_cpu'] = bounds
        pairs.append((ids, kwargs))

    pairs: list[tuple[torch.Tensor, dict[str, Any]]] = []
    for _ in range(2):
        run()
    model.train()

    def step() -> None:
        ids, kwargs = pairs.pop(0)
        model(ids, labels=ids, use_cache=False, **kwargs).loss.backward()

    return count(step)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks waits', description=__doc__.splitlines()[0])
    parser.add_argument('--json', metavar='FILE', help='file for the counts')
    options = parser.parse_args(args)
    if not pretend.is_installed():
        raise SystemExit('the pretend device comes before torch: run this as a program of its own')
    rows: dict[str, dict[str, Any]] = {}
    print('| model | call | waits | launches | allocations |\n| --- | --- | --- | --- | --- |')
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config()).cuda()
        calls: dict[str, Callable[[], dict[str, Any]]] = {
            'token': lambda model=model: decoded_token(model, False),
            'token, mask': lambda model=model: decoded_token(model, True),
        }
        for kind in ('plain', 'mask', 'cu_seqlens', 'cu_seqlens and a copy'):
            if kind == 'cu_seqlens and a copy' and not name.startswith('Longhorn'):
                continue
            calls[f'step, {kind}'] = lambda model=model, kind=kind: training_step(model, kind)
        for call, run in calls.items():
            row = rows.setdefault(name, {})[call] = run()
            print(f'| {name} | {call} | {row["waits"]} | {row["launches"]} | {row["allocations"]} |', flush=True)
    if options.json:
        timing.write_report({'layers': 4, 'batch_size': 2, 'tokens': T, 'rows': rows}, options.json)
