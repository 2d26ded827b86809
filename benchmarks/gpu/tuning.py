"""Launch parameters by time, and a compiled layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu import passes
from benchmarks.gpu.steps import LAYER_WIDTH, LAYERS
from benchmarks.measure.timing import describe_error
from fla_longhorn.ops.triton.launch import LaunchConfig

# of a kernel's launch, by its own: none changes in which order numbers are added
CHANGES: tuple[Callable[[LaunchConfig], dict[str, Any]], ...] = (
    lambda config: {'num_warps': 2 * config.num_warps}, lambda config: {'num_warps': config.num_warps // 2},
    lambda config: {'maxnreg': 128}, lambda config: {'maxnreg': 168},
)


def kernel_name(kernel: Any) -> str:
    while hasattr(kernel, 'fn'):
        kernel = kernel.fn
    return kernel.__name__


@contextmanager
def changed(name: str | None, changes: dict[str, Any]) -> Iterator[dict[str, LaunchConfig]]:
    """Launches of the kernel `name` have `changes`; yields the records of all kernels that are launched."""
    of, seen = LaunchConfig.of, {}

    def choose(self: LaunchConfig, kernel: Any) -> dict[str, int]:
        seen[kernel_name(kernel)] = self
        return of(replace(self, **changes) if kernel_name(kernel) == name else self, kernel)

    with mock.patch.object(LaunchConfig, 'of', choose):
        yield seen


def parameters(form: str, device: str) -> Iterator[dict]:
    """Forward and backward of the layer's call at K = 16 with each change of each kernel, and with none."""
    forward, leaves = passes.make_call(passes.Call(form, 16), device)

    def run() -> list[torch.Tensor]:
        o = forward()
        return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]

    with changed(None, {}) as seen:
        wanted = run()
        own = passes.eager_ms(run, device)
    yield {'kernel': 'as the package chooses', 'ms': own}
    for name, config in dict(seen).items():
        for changes in (change(config) for change in CHANGES if 0 not in change(config).values()):
            row = {'kernel': name, 'changes': changes}
            try:
                with changed(name, changes):
                    results = run()
                    if device == 'meta' or all(map(torch.equal, results, wanted)):
                        row['ms'] = passes.eager_ms(run, device)
                    else:
                        row['not'] = 'other bits'
            # the card or the compiler may refuse a change
            except Exception as error:
                row['not'] = describe_error(error)
            yield row


def compiled_layer(name: str, device: str) -> Iterator[dict]:
    """A layer by `torch.compile` beside the eager one: difference, and milliseconds of forward and backward."""
    from triton.testing import do_bench

    torch.manual_seed(0)
    with torch.device(device):
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


PLAN: dict[str, Callable[[str], Iterator[dict]]] = {
    'parameters, exact': partial(parameters, 'exact'), 'parameters, diagonal': partial(parameters, 'diagonal'),
    'torch.compile, exact': partial(compiled_layer, 'Longhorn, exact'),
    'torch.compile, diagonal': partial(compiled_layer, 'Longhorn, diagonal'),
}


def items(device: str) -> list[str]:
    # what Inductor makes is not known before
    return [item for item in PLAN if device != 'meta' or item.startswith('parameters')]


def run(item: str, device: str) -> Iterator[dict]:
    yield from PLAN[item](device)
