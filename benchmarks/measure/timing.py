"""Time and memory of a call on a CPU or a GPU, peak rates of the device, and comparison of two reports."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import geometric_mean, median, quantiles

import torch


def measure_times(run: Callable, device: torch.device, seconds: float = 0.3) -> list[float]:
    """Milliseconds of each repeat of a call that has run before.

    On a GPU after a warm-up, between two events, with the L2 cache flushed before each repeat; on a CPU by the clock.
    """
    if device.type == 'cuda':
        from triton.testing import do_bench

        return [float(x) for x in do_bench(run, warmup=100, rep=1e3 * seconds, return_mode='all')]
    return clock_times(run, device, seconds)


def clock_times(run: Callable, device: torch.device, seconds: float = 0.3) -> list[float]:
    """Milliseconds by the clock, host included, of each repeat of a call that has run before.

    Three repeats or more, fewer only if they take longer than two seconds together.
    """
    return take_turns({'': run}, device, seconds)['']


def take_turns(
    runs: dict[str, Callable], device: torch.device, seconds: float = 0.3, errors: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """`clock_times` of several calls in turn, so that other load on the machine affects all of them.

    A call that raises gets no more turns and its reason goes to `errors`; without `errors` it is raised.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    budget = 1e3 * seconds

    def left(name: str) -> bool:
        spent, repeats = sum(times[name]), len(times[name])
        return name not in (errors or ()) and spent < (max(2e3, budget) if repeats < 3 else budget) and repeats < 100

    while turn := [name for name in runs if left(name)]:
        for name in turn:
            with nullcontext() if errors is None else noted(errors, name):
                start = time.perf_counter()
                runs[name]()
                if device.type == 'cuda':
                    torch.cuda.synchronize(device)
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


@contextmanager
def noted(errors: dict[str, str], name: str) -> Iterator[None]:
    """Catch any exception in the block and describe it in `errors`: other packages' code may fail in any way."""
    try:
        yield
    except Exception as error:
        errors[name] = describe_error(error)


def summarize(times: list[float]) -> dict:
    """Median and quartiles, in milliseconds."""
    low, _, high = quantiles(times, n=4, method='inclusive') if len(times) > 1 else times * 3
    return {'ms': median(times), 'ms_low': low, 'ms_high': high, 'repeats': len(times)}


def peak_bytes(run: Callable, device: torch.device) -> int | None:
    """Peak memory of a call beyond what was in use before, including its result.

    On a GPU by PyTorch's allocator; on a CPU by the process's resident pages, or None without Linux's `/proc/self/clear_refs`.
    """
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # free memory kept by the C library would hide what the call takes
        ctypes.CDLL(None).malloc_trim(0)
        Path('/proc/self/clear_refs').write_text('5')
        before = resident_bytes('VmRSS')
        run()
        return max(resident_bytes('VmHWM') - before, 0)
    except (OSError, AttributeError):
        return None


def resident_bytes(name: str) -> int:
    return 1024 * int(re.search(rf'{name}:\s*(\d+)', Path('/proc/self/status').read_text()).group(1))


def saved_bytes(run: Callable) -> int:
    """Bytes of all storages that `run`'s graph saves for backward, inputs included, each counted once."""
    storages = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    del result
    return sum(storages.values())


def device_rates(device: torch.device) -> dict:
    """Peak rates: bytes per second of a large copy (read + written), multiply-adds per second of a float32 matrix product."""
    large = device.type == 'cuda'
    source = torch.ones(2**28 if large else 2**24, device=device)
    target = torch.empty_like(source)
    n = 8192 if large else 512
    a = torch.ones(n, n, device=device)
    c = torch.empty_like(a)
    target.copy_(source), torch.mm(a, a, out=c)
    copy = min(measure_times(lambda: target.copy_(source), device))
    product = min(measure_times(lambda: torch.mm(a, a, out=c), device))
    return {'bytes_per_s': 2e3 * source.nbytes / copy, 'fma_per_s': 1e3 * n**3 / product}


def describe_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0][:200]}' if lines else type(error).__name__


def write_report(report: dict | list, path: str | Path) -> None:
    """Write JSON; an interruption leaves the old file."""
    part = Path(f'{path}.part')
    part.write_text(json.dumps(report, indent=1) + '\n')
    os.replace(part, path)


def compare(report: dict, other: dict, timed: Callable[[dict], dict]) -> list[str]:
    """Lines that compare the times of `report` with those of `other`; `timed` gives a report's times by name.

    A time is called faster or slower if the quartiles do not overlap.
    """
    lines = []
    for name in ('device', 'threads', 'commit', 'versions'):
        before, now = other['machine'].get(name), report['machine'].get(name)
        if before != now:
            lines.append(f'{name} then: {before}; now: {now}')
    times, before = timed(report), timed(other)
    common = [name for name in times if name in before]
    for name in common:
        now, then = times[name], before[name]
        ratio = now['ms'] / then['ms']
        slower, faster = now['ms_low'] > then['ms_high'], now['ms_high'] < then['ms_low']
        verdict = 'slower' if slower else 'faster' if faster else 'within the spread'
        lines.append(f'{name}: {then["ms"]:.3f} -> {now["ms"]:.3f} ms, x {ratio:.2f}, {verdict}')
    if common:
        mean = geometric_mean(times[name]['ms'] / before[name]['ms'] for name in common)
        lines.append(f'{len(common)} times in both, geometric mean x {mean:.3f}')
    lines.append(f'only now: {len(times) - len(common)}, only then: {len(before) - len(common)}')
    return lines


def report_file(text: str) -> str:
    """The type of an option: a file in a folder that is there, which is noticed before the work."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f'wants a file in a folder that exists, got {text}')
    return text


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every report shares."""
    parser.add_argument('--json', type=report_file, metavar='FILE', help='write the figures here')
    parser.add_argument('--compare', metavar='OLD.json', help='compare with the times of an earlier report')
