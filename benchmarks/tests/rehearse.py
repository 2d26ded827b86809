"""The plan of `python -m benchmarks gpu` by the clock, on a device that sleeps as long as an H200 would take.

    python -m benchmarks.tests.rehearse plan                    # stages, shares, what fits in 9 minutes and in 2
    python -m benchmarks.tests.rehearse run 9 [2 ...] DIR       # so many minutes, with a hang, a crash and a full disk

Items and autotuned configurations are counted by calls on tensors without memory. Seconds are guessed from them and from times
that are predicted or known: nothing here was timed on a GPU.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest import mock

from benchmarks.gpu import run
from benchmarks.report.tables import table

# before the first stage: the probe and unpacking the kit, then its imports; the others' run beside it
PROBE, IMPORTS = 12.0, 12.0
# a configuration of an autotuned kernel; a pass by the profiler, eager and in a graph; a test, with its reference in float64
CONFIGURATION, PASS, TEST = 0.03, 0.6, 2.0
# a model's parameters and optimizer, and its twelve steps of 16,384 tokens at 350 TFLOP/s; 400 steps of 30M parameters
MODEL = {'120M': 3.0, '360M': 5.0, 'layer': 1.0}
LEARNING = 20.0
TUNING = {'parameters': 8.0, 'torch.compile': 40.0}
LOOPS, SMOKE = 0.6, 1.5
TESTS = {'tests': 168, 'more_tests': 1276}
# the third pass hangs, the tenth test of a process ends it
HANGS, CRASHES = ('passes', 2), ('tests', 9)


@cache
def configurations() -> dict[str, int]:
    """Of autotuned kernels that an item is the first to launch, by stage and item; each stage is a process of its own."""
    from triton.runtime.autotuner import Autotuner

    from offgpu.absent_device import announced
    from offgpu.launches import make_driver, rehearsal

    with announced(make_driver('sm_90', 'launch')):
        from benchmarks.gpu.filling import loss_without_memory
        from benchmarks.operators import LonghornKernels
        from offgpu.calibration.calls import operator

        operator('gla', 'chunk_gla')
        counts: Counter[str] = Counter()
        seen: set[tuple] = set()

        def count(self: Autotuner, *args, **kwargs) -> None:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            configs, named = self.prune_configs(kwargs), {**self.nargs, **kwargs}
            key = (stage, self.base_fn.__name__, *(named[name] for name in self.keys if name in named))
            counts[f'{stage}: {item}'] += len(configs) * (key not in seen)
            seen.add(key)
            self.best_config = configs[0]
            self.fn.run(*args, **kwargs, **configs[0].all_kwargs())

        counting = mock.patch.object(Autotuner, 'run', count)
        with rehearsal('sm_90', 'launch'), LonghornKernels(), loss_without_memory(), counting:
            for kind in Autotuner.__subclasses__():
                kind.run = count
            for stage in ('passes', 'steps', 'learning'):
                module = importlib.import_module(f'benchmarks.gpu.{stage}')
                for item in module.items('meta'):
                    [*module.run(item, 'meta')]
    return dict(counts)


def durations() -> dict[str, dict[str, float]]:
    """Seconds of each item by stage, in their order."""
    tuned = configurations()

    def modules(stage: str, seconds) -> dict[str, float]:
        names = importlib.import_module(f'benchmarks.gpu.{stage}').items('cuda')
        return {name: seconds(name) + CONFIGURATION * tuned.get(f'{stage}: {name}', 0) for name in names}

    return {
        'smoke': modules('smoke', lambda _: SMOKE),
        'passes': modules('passes', lambda name: PASS * (1 if ' x 1 x ' in name else 2)),
        'loops': modules('loops', lambda _: LOOPS),
        'steps': modules('steps', lambda name: MODEL[name.partition(':')[0]]),
        'learning': modules('learning', lambda _: LEARNING),
        'tuning': modules('tuning', lambda name: TUNING[name.partition(',')[0]]),
        **{stage: {f'{stage} {i}': TEST for i in range(count)} for stage, count in TESTS.items()},
    }


def fitting(minutes: float) -> list[list[str]]:
    """Stage, share, seconds of its part, of its items, and how many fit, with what earlier stages leave."""
    left, rows, seconds = 60 * minutes - run.LAST_SECONDS - PROBE - IMPORTS, [], durations()
    for i, stage in enumerate(run.STAGES):
        items, lanes = list(seconds[stage.name].values()), lanes_of(stage)
        part = left * stage.share / sum(x.share for x in run.STAGES[i:])
        spent, done = [0.0] * lanes, 0
        for j, each in enumerate(items):
            if spent[j % lanes] + each <= part:
                spent[j % lanes] += each
                done += 1
        used = part if done < len(items) else max(spent)
        left -= used
        rows.append([
            stage.name, f'{stage.share / sum(x.share for x in run.STAGES):.0%}', f'{part:.0f}', f'{sum(items) / lanes:.0f}',
            f'{done} of {len(items)}', lanes,
        ])
    return rows


def lanes_of(stage: run.Stage) -> int:
    return {'smoke': 4, 'tests': 14, 'more_tests': 14}.get(stage.name, 1)


def sleep(stage: str, items: dict[str, float], item: str, device: str):
    """An item that takes its time, or has a fault."""
    at = (stage, [*items].index(item))
    if at == HANGS:
        time.sleep(600)
    if at == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(items[item])
    yield {'pass': 'fwd', 'ms': 1e3 * items[item]}


def write_modules(folder: Path, start: float) -> None:
    """A module for each stage, on the path of its processes, that sleeps."""
    for stage, items in durations().items():
        (folder / f'rehearsed_{stage}.py').write_text(
            f'import time\nfrom functools import partial\nfrom benchmarks.tests.rehearse import sleep\ntime.sleep({start})\n'
            f'ITEMS = {items!r}\n\ndef items(device):\n    return [*ITEMS]\n\nrun = partial(sleep, {stage!r}, ITEMS)\n'
        )


def fill_disk(path: Path, after: float, seconds: float) -> None:
    """For so long, nothing can be written to `path`."""
    time.sleep(after)
    kept = path.with_name('kept')
    path.rename(kept)
    path.symlink_to('/dev/full')
    time.sleep(seconds)
    path.unlink()
    kept.rename(path)


def rehearse(minutes: float, output: Path, full: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(SystemExit):
        write_modules(Path(folder), IMPORTS)
        os.environ['PYTHONPATH'] = os.pathsep.join([folder, os.environ.get('PYTHONPATH', '')])
        stages = [replace(x, module=f'rehearsed_{x.name}', lanes=lanes_of(x)) for x in run.STAGES]
        if full:
            fill = partial(fill_disk, output / 'results.jsonl', 20 * minutes, 15.0)
            threading.Thread(target=fill, daemon=True).start()
        started = time.monotonic()
        status = run.main(['--minutes', str(minutes), '--output', str(output), '--device', 'cpu'], stages)
        print(f'{minutes} minutes: status {status} after {time.monotonic() - started:.0f} s')


def main(command: str, *args: str) -> None:
    if command == 'plan':
        for minutes in (9, 2):
            columns = ['stage', 'share', 'seconds', 'its items take', 'items that fit', 'processes']
            print(f'{minutes} minutes\n\n{table(columns, fitting(minutes))}\n')
    else:
        *calls, folder = args
        for i, minutes in enumerate(calls):
            rehearse(float(minutes), Path(folder), full=i == 0)


if __name__ == '__main__':
    main(*sys.argv[1:])
