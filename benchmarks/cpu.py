"""The ops on the CPU, every backend beside the naive op in one run.

    python -m benchmarks.cpu [--json FILE] [--B 2 --T 1024 --K 16 --V 1536]

Forward, and forward with backward, in the median of several repeats, and as the ratio to the naive op (PyTorch's loop under
autograd). A backend whose result is off is reported as wrong and not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from statistics import median

import torch
import triton

import fla_longhorn
from fla_longhorn.ops import chunk_longhorn, naive_recurrent_longhorn

OPS = {'naive': (naive_recurrent_longhorn, None), 'torch': (chunk_longhorn, 'torch'), 'numba': (chunk_longhorn, 'numba')}


def make_inputs(B: int, T: int, K: int, V: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, T, 1, K), (B, T, 1, K), (B, T, 1, V), (B, T, 1, V)]
    q, k, v, beta = (torch.randn(*shape, generator=generator) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v, beta.sigmoid())]


def forward(op, inputs: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return op(*inputs)[0]


def forward_backward(op, inputs: list[torch.Tensor]) -> torch.Tensor:
    o, _ = op(*inputs)
    return torch.autograd.grad(o.square().sum(), inputs)[0]


def seconds(run, op, inputs: list[torch.Tensor], repeats: int) -> list[float]:
    run(op, inputs)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(op, inputs)
        times.append(time.perf_counter() - start)
    return times


def measure(name: str, inputs: list[torch.Tensor], expected: dict, repeats: int) -> dict:
    op, backend = OPS[name]
    os.environ['FLA_LONGHORN_BACKEND'] = backend or ''
    row = {'op': name}
    for run in (forward, forward_backward):
        got = run(op, inputs)
        expected.setdefault(run.__name__, got)
        error = ((got - expected[run.__name__]).norm() / expected[run.__name__].norm()).item()
        row[f'{run.__name__}_error'] = error
        row[f'{run.__name__}_seconds'] = seconds(run, op, inputs, repeats) if error <= 1e-4 else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (('B', 2), ('T', 1024), ('K', 16), ('V', 1536), ('repeats', 5)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--json', help='file for the figures')
    args = parser.parse_args()
    inputs, expected = make_inputs(args.B, args.T, args.K, args.V), {}
    rows = [measure(name, inputs, expected, args.repeats) for name in OPS]

    print(f'B={args.B} T={args.T} H=1 K={args.K} V={args.V}, float32, {torch.get_num_threads()} threads')
    for row in rows:
        cells = []
        for run in ('forward', 'forward_backward'):
            times, naive = row[f'{run}_seconds'], rows[0][f'{run}_seconds']
            if times is None:
                cells.append(f'{run}: wrong, error {row[f"{run}_error"]:.1e}')
            else:
                cells.append(f'{run} {1e3 * median(times):8.1f} ms ({median(naive) / median(times):6.1f} x naive)')
        print(f'{row["op"]:>6}  ' + '   '.join(cells))
    if args.json:
        machine = {
            'processor': platform.processor() or platform.machine(), 'threads': torch.get_num_threads(),
            'torch': torch.__version__, 'triton': triton.__version__, 'fla_longhorn': fla_longhorn.__version__,
        }
        with open(args.json, 'w') as file:
            json.dump({'machine': machine, 'shape': vars(args), 'rows': rows}, file, indent=1)


if __name__ == '__main__':
    main()
