"""The least bytes that a training step's kernels move, counted without a GPU: Longhorn, fla's GLA and delta rule.

    python -m benchmarks traffic [--json FILE]

Captures every Triton launch for an H100 and counts each of its tensor arguments once, whether the kernel reads it several
times or only in part. Divided by tokens and channels; one head, 16-bit inputs. PyTorch's own kernels (`eps * v` before fla's,
the gate after it) are not counted.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator

import torch

from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from fla_longhorn.ops import triton as longhorn_triton
from fla_longhorn.ops.arguments import Arguments
from offgpu.launches import rehearsal

STATE_SIZES = (16, 32, 64, 128)
# rows that fill a device once: no sequence is split, each program has its own scratch memory
B, T, V = 32, 512, 1024


def longhorn(exact: bool, scalar: bool) -> Callable:
    """Forward and backward of our own kernels for q, k, v and beta."""
    def passes(q, k, v, steps, step, decays) -> Iterator[None]:
        args = Arguments(*(x.detach() for x in (q, k, v, step if scalar else steps)), exact=exact)
        o, _, states = longhorn_triton.longhorn_fwd(args, save_states=True, parallel=True)
        yield
        longhorn_triton.longhorn_bwd(torch.empty_like(o), None, states, args, parallel=True)
        yield
    return passes


def fla_op(name: str, module: str, argument: str) -> Callable:
    def passes(q, k, v, steps, step, decays) -> Iterator[None]:
        op = getattr(importlib.import_module(f'fla.ops.{module}'), name)
        o, _ = op(q, k, v, **{argument: step if argument == 'beta' else decays}, scale=1.0)
        yield
        o.backward(torch.empty_like(o))
        yield
    return passes


OPERATORS = {
    'Longhorn': longhorn(exact=False, scalar=False),
    'Longhorn exact': longhorn(exact=True, scalar=False),
    'Longhorn scalar': longhorn(exact=False, scalar=True),
    'chunk_gla': fla_op('chunk_gla', 'gla', 'g'),
    'Longhorn exact scalar': longhorn(exact=True, scalar=True),
    'chunk_delta_rule': fla_op('chunk_delta_rule', 'delta_rule', 'beta'),
}


def measure(name: str, K: int) -> dict:
    """Bytes per (token, channel) and number of launches, forward and backward."""
    def draw(*shape):
        return torch.empty(B, T, 1, *shape, dtype=torch.bfloat16, device='meta').requires_grad_()

    row = {'operator': name, 'K': K}
    with rehearsal('sm_90', 'launch') as launches:
        passes = OPERATORS[name](draw(K), draw(K), draw(V), draw(V), draw(), draw(K).detach().float().log().requires_grad_())
        for key in ('forward', 'backward'):
            before = len(launches)
            next(passes)
            own = launches[before:]
            total = sum(launch.moved_bytes() for launch in own)
            row[key] = {'bytes': round(total / (B * T * V), 2), 'launches': len(own)}
    return row


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks traffic', description=__doc__.splitlines()[0])
    parser.add_argument('--json', metavar='FILE', help='file for the rows')
    options = parser.parse_args(args)
    print(f'{"bytes a (token, channel)":26}{"K":>5}{"forward":>10}{"backward":>10}{"sum":>8}{"launches":>10}')
    rows = []
    for K in STATE_SIZES:
        for name in OPERATORS:
            row = measure(name, K)
            rows.append(row)
            forward, backward = row['forward'], row['backward']
            total, launches = forward['bytes'] + backward['bytes'], forward['launches'] + backward['launches']
            print(f'{name:26}{K:5}{forward["bytes"]:10.1f}{backward["bytes"]:10.1f}{total:8.1f}{launches:10}', flush=True)
    if options.json:
        report = {'machine': describe_machine(torch.device('cpu')), 'tokens': T, 'channels': V, 'rows': rows}
        timing.write_report(report, options.json)
