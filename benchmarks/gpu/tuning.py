"""Launch parameters by time, a compiled layer, and vLLM's mixer where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.steps import LAYER_WIDTH, LAYERS
from fla_longhorn.selfcheck.case import Case
from fla_longhorn.tune import Call, run_all, tune


def tuned(exact: bool, K: int, device: torch.device) -> Iterator[dict]:
    case = Case(
        B=8, T=2048, H=1, K=K, V=4096, dtype=torch.bfloat16, sigmoid=True, D=True, z=True, final_state=False,
    )
    if device.type == 'meta':
        run_all(partial(Call, case, exact, device))
        return
    for row in tune(Call(case, exact, device)):
        if row['verdict'] in ("the rule's", 'fastest', 'other bits') or row['ms'] is None:
            yield {name: row[name] for name in ('rule', 'pass', 'changes', 'ms', 'verdict')}


def compiled_layer(name: str, device: torch.device) -> Iterator[dict]:
    """A layer by `torch.compile` beside the eager one: difference, and milliseconds of forward and backward."""
    from triton.testing import do_bench

    torch.manual_seed(0)
    with device:
        layer = LAYERS[name](LAYER_WIDTH).bfloat16().train()
        x = torch.randn(8, 2048, LAYER_WIDTH, dtype=torch.bfloat16).requires_grad_()
    run = torch.compile(lambda x: layer(x)[0])

    def step(forward: Callable) -> list[torch.Tensor]:
        y = forward(x)
        return [y, torch.autograd.grad(y, x, torch.ones_like(y))[0]]

    pairs = zip(step(lambda x: layer(x)[0]), step(run), strict=True)
    off = [((a - b).float().norm() / a.float().norm()).item() for a, b in pairs]
    yield {'off': off, 'eager_ms': do_bench(lambda: step(lambda x: layer(x)[0])), 'compiled_ms': do_bench(lambda: step(run))}
    assert max(off) < 2e-2, f'compiled and eager differ by {off}'


def vllm_mixer(device: torch.device) -> Iterator[dict]:
    """Is vLLM there, and does it know the model?"""
    import vllm
    from vllm import ModelRegistry

    known = [name for name in ModelRegistry.get_supported_archs() if 'Longhorn' in name]
    yield {'vllm': vllm.__version__, 'architectures': known}


PLAN: dict[str, Callable[[torch.device], Iterator[dict]]] = {
    'parameters, exact, K = 16': partial(tuned, True, 16), 'parameters, diagonal, K = 16': partial(tuned, False, 16),
    'torch.compile, exact': partial(compiled_layer, 'Longhorn, exact'),
    'torch.compile, diagonal': partial(compiled_layer, 'Longhorn, diagonal'),
    'vLLM': vllm_mixer,
}


def items(device: torch.device) -> list[str]:
    # what Inductor makes is not known before, and a tuner's choices are many
    return [*PLAN] if device.type != 'meta' else []


def run(item: str, device: torch.device) -> Iterator[dict]:
    yield from PLAN[item](device)
