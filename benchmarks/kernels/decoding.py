"""The kernels of one decoded token: launches of a Longhorn model, counted without a GPU.

    python -m benchmarks decoding [--layers 24] [--json FILE]

The model runs eagerly on `meta`. Triton's launches are captured, and each of PyTorch's operators that is neither a view nor an
allocation counts as one kernel. (A matrix product may take two if cuBLAS splits its sum; `torch.compile` fuses the norms with
the additions before them.) Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch

from benchmarks.measure import timing
from benchmarks.measure.machine import describe_machine
from benchmarks.operators import LonghornKernels
from fla_longhorn.models import LonghornConfig, LonghornForCausalLM
from offgpu.launches import rehearsal
from offgpu.predict.capture import Operators

BATCH_SIZE, PROMPT = 8, 5
LAYERS, HIDDEN_SIZE = 24, 768


def count_launches(layers: int = LAYERS, **options) -> Counter:
    """How often each kernel runs for one token of every sequence in a batch; `options` are LonghornConfig's."""
    config = LonghornConfig(num_hidden_layers=layers, hidden_size=HIDDEN_SIZE, **options)
    with torch.device('meta'):
        model = LonghornForCausalLM(config).bfloat16().eval()
        ids = torch.zeros(BATCH_SIZE, PROMPT, dtype=torch.long)
    with torch.no_grad(), rehearsal('sm_90', 'launch') as launches, LonghornKernels():
        cache = model(ids, use_cache=True).past_key_values
        launches.clear()
        with Operators(launches):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        return Counter(launch.kernel.removeprefix('torch.') for launch in launches)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks decoding', description=__doc__.splitlines()[0])
    parser.add_argument('--layers', type=int, default=LAYERS, help='layers of the model')
    parser.add_argument('--json', metavar='FILE', help='file for the counts')
    options = parser.parse_args(args)
    rows = {}
    for name, exact in (('Longhorn', False), ('Longhorn exact', True)):
        counts = rows[name] = dict(count_launches(options.layers, exact=exact).most_common())
        print(f'{name}, one token of a model of {options.layers} layers: {sum(counts.values())} kernels')
        for kernel, number in counts.items():
            print(f'{number:8} {kernel}')
    if options.json:
        report = {'machine': describe_machine(torch.device('cpu')), 'layers': options.layers, 'kernels': rows}
        timing.write_report(report, options.json)
