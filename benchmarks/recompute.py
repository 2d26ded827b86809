"""The cost of recomputing the convolution's output and the step sizes in a layer's backward.

    python -m benchmarks recompute [--json FILE]

Measured on this machine: steps with and without recomputation in turn, by process time, which other load hardly changes.
`python -m benchmarks layers` predicts the cost on a GPU.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from fla_longhorn.layers import Longhorn

# of the paper's 120M model
WIDTH = 768


def measured_cost(width: int, exact: bool, dtype: torch.dtype, tokens: int, pairs: int) -> dict[str, Any]:
    """Time of a step with recomputation over one without, in pairs: the median of the ratios, and quartiles."""
    torch.manual_seed(0)
    layers = [Longhorn(hidden_size=width, exact=exact, recompute=x).to(dtype) for x in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    h = torch.randn(1, tokens, width, dtype=dtype, device='cpu', requires_grad=True)

    def step(layer: Longhorn) -> float:
        layer.zero_grad()
        start = time.process_time()
        layer(h)[0].sum().backward()
        return 1e3 * (time.process_time() - start)

    for layer in layers * 2:
        step(layer)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(pairs):
        for j in ((0, 1), (1, 0))[i % 2]:
            times[j].append(step(layers[j]))
    low, middle, high = quantiles([b / a for a, b in zip(*times, strict=True)], n=4, method='inclusive')
    return {
        'width': width, 'update': 'exact' if exact else 'diagonal', 'dtype': str(dtype).removeprefix('torch.'),
        'tokens': tokens, 'pairs': pairs, 'ms': round(median(times[0]), 2), 'ratio': round(middle, 4),
        'ratio_low': round(low, 4), 'ratio_high': round(high, 4),
    }


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks recompute', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--pairs', type=int, default=12)
    parser.add_argument('--tokens', type=int, default=128)
    parser.add_argument('--json', metavar='FILE', help='file for the rows')
    options = parser.parse_args(args)
    measured = []
    for dtype in (torch.bfloat16, torch.float32):
        for exact in (False, True):
            # the short steps vary more
            pairs = options.pairs * (5 if dtype == torch.float32 else 1)
            x = measured_cost(WIDTH, exact, dtype, options.tokens, pairs)
            measured.append(x)
            print(f'{x["update"]}, {x["dtype"]}: x {x["ratio"]:.3f} ({x["ratio_low"]:.3f} to {x["ratio_high"]:.3f}) of '
                  f'{x["ms"]:.1f} ms', flush=True)
    if options.json:
        timing.write_report({'machine': describe_machine(), 'measured': measured}, options.json)
