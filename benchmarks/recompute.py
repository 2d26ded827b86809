"""The cost of recomputing the convolution's output and the step sizes in a layer's backward.

    python -m benchmarks recompute [--json FILE]

Predicted for a GPU: the operators' times are those of `results/predicted.json`; everything else, recomputation included, takes
the least time for its bytes or products. Measured on this machine: steps with and without recomputation in turn, by process
time, which other load hardly changes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from fla_longhorn.layers import Longhorn
from offgpu.predict.machine import MACHINES, Machine

PREDICTED = Path(__file__).parent / 'results' / 'predicted.json'
# widths of the paper's models, and (B, T) of their predicted rows
MODELS = {'120M': (768, 64, 2048), '1.3B': (2048, 8, 2048)}
STATE_SIZE, HALF = 16, 2


def product_ms(tokens: int, inputs: int, outputs: int, machine: Machine) -> float:
    """The least time of a product of `[tokens, inputs]` and `[inputs, outputs]` in 16 bits."""
    fma = tokens * inputs * outputs / (machine.multiprocessors * machine.tensor_rate * machine.clock)
    moved = HALF * (tokens * inputs + inputs * outputs + tokens * outputs) / machine.dram_bandwidth
    return 1e3 * max(fma, moved)


def predicted_cost(model: str, exact: bool, rows: list[dict], machine: Machine) -> dict[str, Any]:
    """Milliseconds of the operators, of the rest of a step (with the norm before the layer), and of recomputation."""
    width, B, T = MODELS[model]
    d, rank, tokens = 2 * width, width // 16, B * T
    update = 'exact' if exact else 'diagonal'
    times = {
        row['pass']: row['ms'] for row in rows
        if (row['gpu'], row['B'], row['T'], row['V'], row['K']) == (machine.name, B, T, d, STATE_SIZE)
    }
    def moved_ms(tensors: float, channels: int) -> float:
        return 1e3 * HALF * tensors * tokens * channels / machine.dram_bandwidth

    # forward reads x and writes y, backward reads x and dy and writes dx; the norm before the layer also the residual
    convolution = moved_ms(2, d)
    around = moved_ms(3, d) + moved_ms(8, width)
    sizes = ((width, 2 * d), (d, rank + 2 * STATE_SIZE), (rank, d), (d, width))
    # forward, and backward for the input and for the weight
    products = 3 * sum(product_ms(tokens, *size, machine) for size in sizes)
    operators = sum(times[f'{update}_{direction}'] for direction in ('fwd', 'bwd'))
    rest, again = products + convolution + around, convolution + product_ms(tokens, rank, d, machine)
    return {
        'model': model, 'update': update, 'gpu': machine.name, 'operators_ms': round(operators, 3), 'rest_ms': round(rest, 3),
        'again_ms': round(again, 3), 'share': round(again / (operators + rest), 4),
    }


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
    rows, machine = json.loads(PREDICTED.read_text())['rows'], MACHINES['H100']()
    predicted = [predicted_cost(model, exact, rows, machine) for model in MODELS for exact in (False, True)]
    for x in predicted:
        print(f'{x["gpu"]}, {x["model"]}, {x["update"]}: {x["share"]:.1%} of a step, predicted', flush=True)
    measured = []
    for dtype in (torch.bfloat16, torch.float32):
        for exact in (False, True):
            # the short steps vary more
            pairs = options.pairs * (5 if dtype == torch.float32 else 1)
            x = measured_cost(MODELS['120M'][0], exact, dtype, options.tokens, pairs)
            measured.append(x)
            print(f'{x["update"]}, {x["dtype"]}: x {x["ratio"]:.3f} ({x["ratio_low"]:.3f} to {x["ratio_high"]:.3f}) of '
                  f'{x["ms"]:.1f} ms', flush=True)
    if options.json:
        timing.write_report({'machine': describe_machine(), 'predicted': predicted, 'measured': measured}, options.json)


if __name__ == '__main__':
    main()
