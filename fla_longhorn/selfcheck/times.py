"""Times of a few passes, beside those that were measured on an H200."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options

# milliseconds of forward and backward on an NVIDIA H200 with torch 2.11 and Triton 3.6, by operator and K; the last two are
# mostly the host's
H200 = {
    ('exact', 16): (0.441, 1.119), ('diagonal', 16): (0.483, 2.973), ('exact', 64): (0.538, 1.583),
    ('diagonal', 64): (1.433, 16.303), ('chunk_delta_rule', 16): (0.540, 1.282),
}
COLUMNS = ('pass', 'K', 'here', 'H200')


def make_case(K: int) -> Case:
    """As a layer calls the operator in training."""
    return Case(
        B=8, T=2048, H=1, K=K, V=4096, dtype=torch.bfloat16, sigmoid=True, D=True, z=True, final_state=False,
    )


def make_passes(name: str, K: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of the operator, each of which can be called again."""
    inputs: dict[str, Any] = make_inputs(make_case(K), device)
    if name == 'chunk_delta_rule':
        from fla.ops.delta_rule import chunk_delta_rule

        k, beta = F.normalize(inputs['k'].float(), dim=-1).bfloat16(), inputs['beta'][..., 0].sigmoid()
        inputs = {'q': inputs['q'], 'k': k, 'v': inputs['v'], 'beta': beta}
        inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        forward = partial(chunk_delta_rule, **inputs, scale=1.0)
    else:
        forward = partial(chunk_longhorn, **inputs, **make_options(make_case(K), device, name == 'exact'))
    o = forward()[0]
    return forward, partial(torch.autograd.grad, o, list(inputs.values()), torch.ones_like(o), retain_graph=True)


def measure_passes(device: torch.device, until: float) -> Iterator[tuple[str, ...]]:
    """Rows of `COLUMNS`, medians of eager calls in milliseconds; operators not begun at the time `until` have none."""
    from triton.testing import do_bench

    for (name, K), known in H200.items():
        times = ['not reached'] * 2
        try:
            if time.time() < until:
                passes = make_passes(name, K, device)
                times = [f'{do_bench(run, warmup=20, rep=100, return_mode="median"):.3f}' for run in passes]
        # a card may lack memory, or a compiler an instruction
        except Exception as error:
            times = [f'{type(error).__name__}: {error}'.splitlines()[0][:80]] * 2
        for direction, here, ms in zip(('forward', 'backward'), times, known, strict=True):
            yield f'{name} {direction}', str(K), here, f'{ms:.3f}'
