"""Requests that arrive at random, served by vLLM (Longhorn, Mamba-2) and by static batches of `generate`, on a CPU.

    .venv-serving/bin/python -m benchmarks arrivals [--json FILE] [--requests 32] [--loads 0.3 0.9] [--slots 8]
        [--peaks 1 8 32]

Arrivals are a Poisson process, lengths of prompts and answers are uniform; all systems get the same requests at the same
times. A rate is a part of what vLLM does with Longhorn when all requests are there at once. Static batches start when `slots`
requests wait or the first has waited for `WAIT` seconds, and end with the longest answer. All answers are streams: latencies
are from a request's arrival to its first token, its last token, and per token in between. Each system is a process of its own.
Peaks are tokens a second of vLLM when all requests are there at once, by how many it serves at a time, three times each; two
for each place and six more are asked, so that the last have fewer beside them. They are measured with vLLM's compiler too, its
default, which needs one of C++; all else is eager.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report
from benchmarks.models.serving import ONE_PROCESS, SIZE, make

PROMPTS, ANSWERS, WAIT = (16, 128), (16, 96), 0.5
PERCENTILES = (50, 90, 99)
# how often a peak is measured
PEAKS = 3
SYSTEMS = ('vllm longhorn', 'vllm mamba2', 'generate longhorn')
# `(arrival, prompt, tokens of the answer)`, and the times of each answer's tokens
Request = tuple[float, list[int], int]
Server = Callable[[list[Request]], list[list[float]]]


def requests(number: int, rate: float, seed: int = 0) -> list[Request]:
    """At `rate` a second."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1, number)) / rate
    lengths = random.integers(*PROMPTS, number, endpoint=True), random.integers(*ANSWERS, number, endpoint=True)
    return [(float(at), random.integers(SIZE['vocab_size'], size=n).tolist(), int(new))
            for at, n, new in zip(times, *lengths, strict=True)]


def in_vllm(folder: str, slots: int, compiled: bool) -> Server:
    from vllm import LLM, SamplingParams

    engine = LLM(folder, skip_tokenizer_init=True, dtype='float32', max_model_len=PROMPTS[1] + ANSWERS[1], max_num_seqs=slots,
                 enforce_eager=not compiled, enable_prefix_caching=False).llm_engine

    def serve(asked: list[Request]) -> list[list[float]]:
        answers, sent, start = [[] for _ in asked], 0, time.perf_counter()
        while sent < len(asked) or engine.has_unfinished_requests():
            now = time.perf_counter() - start
            while sent < len(asked) and asked[sent][0] <= now:
                _, prompt, new = asked[sent]
                engine.add_request(str(sent), {'prompt_token_ids': prompt}, SamplingParams(
                    temperature=0, max_tokens=new, ignore_eos=True, detokenize=False,
                ))
                sent += 1
            if not engine.has_unfinished_requests():
                time.sleep(asked[sent][0] - now)
                continue
            for output in engine.step():
                times = answers[int(output.request_id)]
                times += [time.perf_counter() - start] * (len(output.outputs[0].token_ids) - len(times))
        return answers

    return serve


class Clock:
    """A streamer that notes when each token of a batch comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def in_batches(model, slots: int) -> Server:
    def serve(asked: list[Request]) -> list[list[float]]:
        answers, start = [], time.perf_counter()
        while len(answers) < len(asked):
            waiting = asked[len(answers):][:slots]
            # full, or the first has waited long enough
            begin = min(waiting[0][0] + WAIT, waiting[-1][0])
            time.sleep(max(0.0, begin - (time.perf_counter() - start)))
            now, clock = time.perf_counter() - start, Clock()
            batch = [x for x in waiting if x[0] <= now]
            longest = max(len(prompt) for _, prompt, _ in batch)
            ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for _, prompt, _ in batch])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for _, prompt, _ in batch])
            model.generate(ids, attention_mask=mask, max_new_tokens=max(new for *_, new in batch), do_sample=False,
                           streamer=clock)
            # the first is the prompt
            answers += [[t - start for t in clock.times[1:new + 1]] for *_, new in batch]
        return answers

    return serve


def figures(asked: list[Request], answers: list[list[float]]) -> dict:
    """Tokens per second, and percentiles of the latencies in ms."""
    if [len(times) for times in answers] != [new for *_, new in asked]:
        raise ValueError('every request must get as many tokens as it asked for')
    span = max(times[-1] for times in answers) - asked[0][0]
    latencies = {
        'first token': [times[0] - at for (at, *_), times in zip(asked, answers, strict=True)],
        'per token': [(times[-1] - times[0]) / (len(times) - 1) for times in answers],
        'whole answer': [times[-1] - at for (at, *_), times in zip(asked, answers, strict=True)],
    }
    return {'tokens_per_s': sum(map(len, answers)) / span, 'requests_per_s': len(asked) / span, 'latency_ms': {
        name: {f'p{p}': float(np.percentile(values, p)) * 1e3 for p in PERCENTILES} for name, values in latencies.items()
    }}


def run_system(
    name: str, number: int, slots: int, loads: list[float], rates: list[float] | None, compiled: bool,
) -> dict:
    with TemporaryDirectory() as folder:
        model = make(folder, name.split()[1])
        parameters = sum(x.numel() for x in model.parameters())
        serve = in_batches(model, slots) if name.startswith('generate') else in_vllm(folder, slots, compiled)
        # the first requests compile
        serve(requests(slots, 1e6, seed=1))
        at_once = requests(number, 1e6)
        peaks = [figures(at_once, serve(at_once)) for _ in range(PEAKS)]
        peak = sorted(peaks, key=lambda x: x['tokens_per_s'])[PEAKS // 2]
        rates = rates or [load * peak['requests_per_s'] for load in loads]
        rows = []
        for load, rate in zip(loads, rates, strict=True):
            asked = requests(number, rate)
            rows.append({'load': load, 'rate': rate, **figures(asked, serve(asked))})
    return {'system': name, 'parameters': parameters, 'peak_tokens_per_s': peak['tokens_per_s'], 'rates': rates, 'rows': rows,
            'peaks': [x['tokens_per_s'] for x in peaks]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks arrivals', description=__doc__.partition('\n')[0])
    parser.add_argument('--json', type=Path, help='file for the results')
    parser.add_argument('--requests', type=int, default=32)
    parser.add_argument('--loads', type=float, nargs='*', default=[0.3, 0.9], help='parts of the throughput of vLLM')
    parser.add_argument('--slots', type=int, default=8, help='requests at a time')
    parser.add_argument('--peaks', type=int, nargs='*', default=[1, 8, 32], help='requests at a time, for the peaks')
    parser.add_argument('--systems', nargs='+', choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument('--rates', type=float, nargs='+', help=argparse.SUPPRESS)
    parser.add_argument('--part', type=Path, help=argparse.SUPPRESS)
    parser.add_argument('--compiled', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        os.environ.update(ONE_PROCESS, VLLM_LOGGING_LEVEL='ERROR', VLLM_CPU_OMP_THREADS_BIND='nobind')
        result = run_system(options.systems[0], options.requests, options.slots, options.loads, options.rates,
                            options.compiled)
        options.part.write_text(json.dumps(result))
        return 0
    systems: list[dict] = []
    with TemporaryDirectory() as folder:
        part = Path(folder) / 'part.json'

        def measure(name: str, number: int, slots: int, compiled: bool = False, **loads: list[float]) -> dict:
            given = [x for option, values in loads.items() for x in (f'--{option}', *map(str, values))]
            given += ['--compiled'] * compiled
            subprocess.run([
                sys.executable, '-m', 'benchmarks', 'arrivals', '--part', part, '--systems', name, '--requests', str(number),
                '--slots', str(slots), *given,
            ], check=True, stdout=subprocess.DEVNULL)
            return json.loads(part.read_text())

        for name in options.systems:
            rates = {'rates': systems[0]['rates']} if systems else {}
            systems.append(measure(name, options.requests, options.slots, loads=options.loads, **rates))
            for row in systems[-1]['rows']:
                print(f"{name}: load {row['load']}, {row['tokens_per_s']:.0f} tokens/s, median of the first token "
                      f"{row['latency_ms']['first token']['p50']:.0f} ms", flush=True)
        peaks = []
        in_turn = [x for x in options.systems if x.startswith('vllm')]
        for slots, compiled, name in product(options.peaks, (False, True), in_turn):
            found = measure(name, 2 * slots + 6, slots, compiled, loads=[])['peaks']
            peaks.append({'slots': slots, 'system': name, 'compiled': compiled, 'tokens_per_s': found})
            print(f"{name}{', compiled' * compiled}: {slots} at a time, {found} tokens/s at once", flush=True)
    # at the end, so that the load shows what else ran
    machine = describe_machine('cpu')
    result = {'machine': machine, 'model': SIZE, 'prompts': PROMPTS, 'answers': ANSWERS, 'requests': options.requests,
              'slots': options.slots, 'wait_s': WAIT, 'systems': systems, 'peaks': peaks}
    if options.json:
        write_report(result, options.json)
    return 0
