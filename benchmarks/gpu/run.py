"""A GPU's half hour: everything that only a card can tell, the most telling first.

    python -m benchmarks gpu --minutes 9 --output DIR [--kit FOLDER] [--stages checks tests ...] [--device cuda]

Each stage runs in processes of its own with a limit. What an item of a stage tells goes to `DIR/results.jsonl` when it ends:
rows, the whole error, the kernels that were compiled. An item that hangs, or that ends its process, is an error of that item.
A second call goes on where the first ended. `DIR/page.md` has predictions beside measurements, failures by name and what was
not reached. The exit status is 1 if an item failed.

`make gpu-kit` makes the folder for `--kit`, packages and Triton's cache. It calls this with `--device meta`, without a GPU:
what all stages would launch is compiled, and the exit status is 1 too if anything was.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu import kit, page
from benchmarks.gpu.lane import Lane
from benchmarks.gpu.results import Results
from benchmarks.gpu.watch import Watch, about_machine

# for the page, at the end of a call
LAST_SECONDS = 5
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Stage:
    """`module` has `items(device)` and `run(item, device)`; each of `lanes` processes takes its share of the items.

    `minutes` limit the stage in its first turn, `seconds` an item.
    """

    name: str
    module: str
    minutes: float
    seconds: float
    lanes: int = 1
    what: str = ''


STAGES = (
    Stage('checks', 'benchmarks.gpu.checks', 2, 90, min(8, CORES), 'operators against float64'),
    Stage('loops', 'benchmarks.gpu.loops', 2, 60, 1, "an instruction's time by the length of its loop, clock, copies"),
    Stage('tests', 'benchmarks.gpu.tests', 8, 120, min(14, CORES), 'the tests, one of each function first'),
    Stage('passes', 'benchmarks.gpu.passes', 8, 150, 1, 'forward and backward, of Longhorn and fla (GLA: six configurations)'),
    Stage('steps', 'benchmarks.gpu.steps', 6, 150, 1, 'training steps; autotuned kernels choose among six configurations'),
    Stage(
        'tuning', 'benchmarks.gpu.tuning', 4, 200, 1, 'launch parameters that keep all bits, by time; torch.compile '
        '(not by fla_cache_autotune: it reads files for kernels that it wraps, and compares no bits)',
    ),
    Stage('learning', 'benchmarks.gpu.learning', 10, 300, 1, 'small language models on equal tokens'),
)


class Run:
    """One call: the stages in turn, until all items have ended or the time is up."""

    def __init__(
        self, stages: Sequence[Stage], results: Results, device: str, end: float, environment: dict[str, str],
    ) -> None:
        self.stages, self.results, self.device, self.end = stages, results, device, end
        self.environment, self.watch = environment, Watch(device)

    def run(self) -> None:
        # in a second turn, stages whose limit ended them go on
        for limited in (True, False):
            for stage in self.stages:
                if time.monotonic() < self.end and not self.results.is_finished(stage.name):
                    spent = self.results.spent.get(stage.name, 0.0)
                    left = 60 * stage.minutes - spent if limited else float('inf')
                    if left > 0:
                        self.run_stage(stage, time.monotonic() + left)
        self.watch.stop()

    def run_stage(self, stage: Stage, end: float) -> None:
        started, finished, whole = time.monotonic(), False, True
        lanes = [Lane(stage, self.device, i, self.environment) for i in range(stage.lanes)]
        try:
            for lane in lanes:
                lane.start(self.results.ended[stage.name])
            while lanes and time.monotonic() < min(end, self.end):
                for lane in list(lanes):
                    for record in lane.take():
                        self.add(stage, record)
                    if lane.state() == 'working':
                        continue
                    if lane.state() == 'ended':
                        lanes.remove(lane)
                    elif lane.restarts():
                        # the item is an error; the others of this lane go on in a new process
                        self.add(stage, lane.failure())
                        lane.start(self.results.ended[stage.name])
                    else:
                        self.add(stage, lane.failure())
                        lanes.remove(lane)
                        whole = False
                time.sleep(0.02)
            finished = whole and not lanes
        finally:
            for lane in lanes:
                lane.kill()
        seconds = time.monotonic() - started
        self.results.add({'stage': stage.name, 'seconds': round(seconds, 1), 'finished': finished})
        print(f'{stage.name}: {"all items" if finished else "not all items"} in {seconds:.0f} s', flush=True)

    def add(self, stage: Stage, record: dict) -> None:
        self.results.add({'stage': stage.name} | record | self.watch.now())
        if error := record.get('error'):
            print(f'{stage.name}: {record.get("item", "a share")}: {error.strip().splitlines()[-1][:200]}', flush=True)


def main(args: list[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks gpu', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--minutes', type=float, default=28.0, help='of this call')
    parser.add_argument('--output', type=Path, required=True, metavar='DIR', help='results of this and of earlier calls')
    parser.add_argument('--kit', type=Path, metavar='FOLDER', help='what `make gpu-kit` made')
    parser.add_argument('--stages', nargs='+', choices=[stage.name for stage in stages], help='only these')
    parser.add_argument('--device', default='cuda')
    options = parser.parse_args(args)
    end = time.monotonic() + 60 * options.minutes - LAST_SECONDS
    environment = kit.unpack(options.kit) if options.kit else {}
    results = Results(options.output)
    results.add({'machine': about_machine(options.device, environment), 'minutes': options.minutes})
    if options.device == 'meta':
        # that compiles: no limits; tests go on where they would compare, with zeros where nothing was launched
        environment |= {'PYTHONOPTIMIZE': '1', 'MALLOC_PERTURB_': '255'}
        stages = [replace(stage, minutes=math.inf, seconds=math.inf, lanes=CORES) for stage in stages]
    chosen = [stage for stage in stages if not options.stages or stage.name in options.stages]
    Run(chosen, results, options.device, end, environment).run()
    text = page.make(results.records, [(stage.name, stage.what) for stage in stages])
    results.write_page(text)
    print(text)
    lacks = options.device == 'meta' and any(record.get('compiled') for record in results.records)
    return int(lacks or any('error' in record for record in results.records))


if __name__ == '__main__':
    sys.exit(main())
