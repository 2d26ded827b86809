"""Requests that arrive at random, served by vLLM (Longhorn, Mamba-2) and by static batches of `generate`, on a CPU.

    .venv-serving/bin/python -m benchmarks arrivals [--json FILE] [--requests 32] [--loads 0.3 0.9] [--slots 8]
        [--peaks 1 8 32]

Arrivals are a Poisson process, lengths of prompts and answers are uniform; all systems get the same requests at the same
times. A rate is a part of what vLLM does with Longhorn when all requests are there at once. Static batches start when `slots`
requests wait or the first has waited for `WAIT` seconds, and end with the longest answer. All answers are streams: latencies
are from a request's arrival to its first token, its last token, and per token in between. Each system is a process of its own,
and they take turns, five for each load and nine for each peak. Peaks are tokens a second of vLLM when all requests are there
at once, by how many it serves at a time; two for each place and six more are asked, so that the last have fewer beside them.
They are measured with vLLM's compiler too, its default, which needs one of C++; all else is eager.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report
from benchmarks.models.serving import ONE_PROCESS, SIZE, make

PROMPTS, ANSWERS, WAIT = (16, 128), (16, 96), 0.5
PERCENTILES = (50, 90, 99)
# how often loads and peaks are measured, and a rate that is none
TURNS, PEAK_TURNS, AT_ONCE = 5, 9, 1e6
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
    """Tokens and requests per second, and each request's latencies in ms."""
    if [len(times) for times in answers] != [new for *_, new in asked]:
        raise ValueError('every request must get as many tokens as it asked for')
    span = max(times[-1] for times in answers) - asked[0][0]
    latencies = {
        'first token': [times[0] - at for (at, *_), times in zip(asked, answers, strict=True)],
        'per token': [(times[-1] - times[0]) / (len(times) - 1) for times in answers],
        'whole answer': [times[-1] - at for (at, *_), times in zip(asked, answers, strict=True)],
    }
    return {'tokens_per_s': sum(map(len, answers)) / span, 'requests_per_s': len(asked) / span, 'latency_ms': {
        name: [1e3 * x for x in values] for name, values in latencies.items()
    }}


def own_process() -> ProcessPoolExecutor:
    """For one system, whose engine stays in it; vLLM reads its variables when it is imported."""
    return ProcessPoolExecutor(1, get_context('spawn'))


@cache
def start(name: str, slots: int, compiled: bool = False) -> tuple[Server, int]:
    """A system that has compiled what it compiles, and how many parameters its model has."""
    os.environ.update(ONE_PROCESS, VLLM_LOGGING_LEVEL='ERROR', VLLM_CPU_OMP_THREADS_BIND='nobind')
    with TemporaryDirectory() as folder:
        model = make(folder, name.split()[1])
        serve = in_batches(model, slots) if name.startswith('generate') else in_vllm(folder, slots, compiled)
        serve(requests(slots, AT_ONCE, seed=1))
    return serve, sum(x.numel() for x in model.parameters())


def serve_at(rate: float, number: int, name: str, slots: int, compiled: bool = False) -> dict:
    """Called in the system's process."""
    serve, parameters = start(name, slots, compiled)
    asked = requests(number, rate)
    return {'parameters': parameters, **figures(asked, serve(asked))}


@contextmanager
def in_turns(names: Sequence[str], slots: int, compiled: bool = False) -> Iterator[Callable[..., dict[str, list[dict]]]]:
    """A function of a rate, a number of requests and of turns: what each system does with them, in every turn.

    Systems take turns, so that a slow minute is everyone's. They start in one that does not count.
    """
    with ExitStack() as stack:
        processes = {name: stack.enter_context(own_process()) for name in names}

        def serve(rate: float, number: int, turns: int) -> dict[str, list[dict]]:
            found: dict[str, list[dict]] = {name: [] for name in names}
            for _ in range(turns):
                for name, process in processes.items():
                    found[name].append(process.submit(serve_at, rate, number, name, slots, compiled).result())
            return found

        serve(AT_ONCE, 2 * slots + 6, 1)
        yield serve


def latencies(turns: list[dict]) -> dict:
    """Over the requests of all turns, and of each turn the median of the first tokens."""
    pooled = {name: [ms for turn in turns for ms in turn['latency_ms'][name]] for name in turns[0]['latency_ms']}
    return {
        'latency_ms': {name: {f'p{p}': float(np.percentile(ms, p)) for p in PERCENTILES} for name, ms in pooled.items()},
        'first_token_ms': [median(turn['latency_ms']['first token']) for turn in turns],
    }


def measure_loads(names: Sequence[str], number: int, slots: int, loads: list[float]) -> list[dict]:
    """Each system under each load, a part of what the first system does."""
    with in_turns(names, slots) as serve:
        at_once = serve(AT_ONCE, number, TURNS)
        most = median(x['requests_per_s'] for x in at_once[names[0]])
        found = {load: serve(load * most, number, TURNS) for load in loads}
    return [{
        'system': name, 'parameters': at_once[name][0]['parameters'],
        'peak_tokens_per_s': median(x['tokens_per_s'] for x in at_once[name]),
        'rows': [{
            'load': load, 'rate': load * most, 'tokens_per_s': median(x['tokens_per_s'] for x in turns[name]),
            **latencies(turns[name]),
        } for load, turns in found.items()],
    } for name in names]


def measure_peaks(names: Sequence[str], slots: int, compiled: bool) -> list[dict]:
    """Tokens a second of each with all requests there at once."""
    with in_turns(names, slots, compiled) as serve:
        found = serve(AT_ONCE, 2 * slots + 6, PEAK_TURNS)
    return [{'slots': slots, 'system': name, 'compiled': compiled, 'tokens_per_s': [x['tokens_per_s'] for x in turns]}
            for name, turns in found.items()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks arrivals', description=__doc__.partition('\n')[0])
    parser.add_argument('--json', type=Path, help='file for the results')
    parser.add_argument('--requests', type=int, default=32)
    parser.add_argument('--loads', type=float, nargs='*', default=[0.3, 0.9], help='parts of the throughput of vLLM')
    parser.add_argument('--slots', type=int, default=8, help='requests at a time')
    parser.add_argument('--peaks', type=int, nargs='*', default=[1, 8, 32], help='requests at a time, for the peaks')
    parser.add_argument('--systems', nargs='+', choices=SYSTEMS, default=SYSTEMS)
    options = parser.parse_args(arguments)
    systems, peaks = measure_loads(options.systems, options.requests, options.slots, options.loads), []
    for system in systems:
        for row in system['rows']:
            print(f"{system['system']}: load {row['load']}, {row['tokens_per_s']:.0f} tokens/s, medians of the first token "
                  f"{[round(x) for x in row['first_token_ms']]} ms", flush=True)
    for slots, compiled in product(options.peaks, (False, True)):
        for peak in measure_peaks([x for x in options.systems if x.startswith('vllm')], slots, compiled):
            peaks.append(peak)
            print(f"{peak['system']}{', compiled' * compiled}: {slots} at a time, "
                  f"{[round(x) for x in peak['tokens_per_s']]} tokens/s at once", flush=True)
    # at the end, so that the load shows what else ran
    machine = describe_machine('cpu')
    result = {'machine': machine, 'model': SIZE, 'prompts': PROMPTS, 'answers': ANSWERS, 'requests': options.requests,
              'slots': options.slots, 'wait_s': WAIT, 'systems': systems, 'peaks': peaks}
    if options.json:
        write_report(result, options.json)
    return 0
