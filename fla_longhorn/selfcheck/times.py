"""Times of the operator on a GPU, beside those measured on an H200."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options

# milliseconds of forward and backward on an NVIDIA H200, 26 November 2026, torch 2.11, Triton 3.6, by update and K
H200 = {('exact', 16): (0.441, 1.119), ('diagonal', 16): (0.483, 2.973), ('exact', 64): (0.538, 1.583),
        ('diagonal', 64): (1.433, 16.303)}
CASE = Case(B=8, T=2048, H=1, V=4096, dtype=torch.bfloat16, sigmoid=True, D=True, z=True, final_state=False)


def measure_passes(device: torch.device) -> Iterator[tuple[str, ...]]:
    """Rows of a table: medians of eager calls, in training and in bfloat16."""
    from triton.testing import do_bench

    yield '8 x 2048 tokens, V = 4096', 'forward, ms', 'H200', 'backward, ms', 'H200'
    for (update, K), known in H200.items():
        try:
            inputs: Any = make_inputs(replace(CASE, K=K), device)
            forward = partial(chunk_longhorn, **inputs, **make_options(CASE, device, update == 'exact'))
            o = forward()[0]
            backward = partial(torch.autograd.grad, o, [*inputs.values()], torch.ones_like(o), retain_graph=True)
            found = [f'{do_bench(run, return_mode="median"):.3f}' for run in (forward, backward)]
        except RuntimeError as error:
            found = [str(error).splitlines()[0][:60], '-']
        yield f'{update}, K = {K}', found[0], f'{known[0]:.3f}', found[1], f'{known[1]:.3f}'
