"""Where a decoding step of vLLM goes, in milliseconds, on a CPU: `.venv-serving/bin/python -m benchmarks serving-parts`.

Wraps the functions of each part with a clock, which takes about 2% itself. A part's time is without the parts that it calls.
Figures are of the fastest of the repeats, each of which serves as in `benchmarks serving`; a prompt's step counts as one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report
from benchmarks.models.serving import NEW, ONE_PROCESS, PROMPT, SIZE, engine, make


class Parts:
    """Seconds of each part, by a stack of the parts that are running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.running: list[str] = []
        self.since = 0.0

    def turn(self) -> None:
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        self.since = now

    def wrap(self, part: str, owner: object, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.wrapped(part, getattr(owner, name)))

    def wrapped(self, part: str, function):
        def clocked(*args, **kwargs):
            self.turn()
            self.running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.running.pop()
        return clocked


def watch(parts: Parts, llm) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from fla_longhorn_serving.vllm import mixer

    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    parts.wrap('rest of the engine', llm, 'generate')
    parts.wrap('scheduler', core.scheduler, 'schedule', 'update_from_output')
    parts.wrap('inputs and metadata', runner, 'execute_model')
    parts.wrap('sampler', runner, 'sample_tokens')
    parts.wrap('head', runner.model, 'compute_logits')
    parts.wrap('model, without its parts', runner, '_model_forward')
    parts.wrap('norms', RMSNorm, 'forward')
    parts.wrap('projections', UnquantizedLinearMethod, 'apply')
    parts.wrap('mixer, without its parts', mixer.LonghornMixer, 'forward_impl')
    parts.wrap('tokens between their projections', mixer, 'mix_tokens')
    parts.wrap('convolution of prompts', mixer, 'convolve')
    parts.wrap('recurrence of prompts', mixer, 'longhorn_state_update')


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks serving-parts', description=__doc__.partition(':')[0])
    parser.add_argument('--json', type=Path, help='file for the results')
    parser.add_argument('--requests', type=int, nargs='+', default=[1, 8], help='at a time')
    parser.add_argument('--repeats', type=int, default=8)
    options = parser.parse_args(arguments)
    os.environ.update(ONE_PROCESS)
    with TemporaryDirectory() as folder:
        model = make(folder)
        serve = engine(folder, max(options.requests))
        parts, rows = Parts(), []
        watch(parts, serve.llm)
        for requests in options.requests:
            ids = torch.randint(SIZE['vocab_size'], (requests, PROMPT), generator=torch.Generator().manual_seed(1))
            mask, found, alone = torch.ones_like(ids), [], []
            for turn in range(options.repeats + 1):
                parts.seconds.clear()
                serve(ids)
                start = time.perf_counter()
                model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
                # the first turn compiles
                if turn > 0:
                    found.append(dict(parts.seconds))
                    alone.append(time.perf_counter() - start)
            best = min(found, key=lambda x: sum(x.values()))
            rows.append({
                'requests': requests, 'vllm_ms': sum(best.values()) / NEW * 1e3, 'generate_ms': min(alone) / NEW * 1e3,
                'parts_ms': {name: seconds / NEW * 1e3 for name, seconds in best.items()},
            })
            print(json.dumps(rows[-1]), flush=True)
        # at the end, so that the load shows what else ran
        machine = describe_machine('cpu')
    result = {'machine': machine, 'model': SIZE, 'prompt': PROMPT, 'new_tokens': NEW, 'repeats': options.repeats, 'rows': rows}
    if options.json:
        write_report(result, options.json)
    return 0
