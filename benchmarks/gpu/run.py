"""A GPU for ten minutes: everything that only a card can tell, the most telling first.

    python -m benchmarks gpu [--minutes 9] [--output DIR] [--kit FOLDER] [--stages passes tests ...] [--device cuda]

Each stage has its share of the time that is left when it begins; what it does not need goes to the later ones. Stages run in
processes of their own, which import beside a stage that is not timed. When an item of a stage ends, `DIR/results.jsonl` has
what it told: rows, the error, the kernels that were compiled. An item that hangs, or that ends its process, is an error of
that item. A second call goes on where the first ended. `DIR/page.md` begins with the first error; it has predictions beside
measurements and what was not reached. The exit status is 1 if an item failed, 2 if nothing can run.

`make gpu-kit` makes the folder for `--kit`, packages and Triton's cache. It calls this with `--device meta`, without a GPU:
what all stages would launch is compiled, and the exit status is 1 too if anything was. README.md has the steps.
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
from benchmarks.gpu.lane import STARTING_SECONDS, Lane
from benchmarks.gpu.results import Results
from benchmarks.gpu.watch import Watch, about_machine

# for the page, at the end of a call
LAST_SECONDS = 5
# the shares below add up to the seconds of a call of this length
MINUTES = 9.0
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Stage:
    """`module` has `items(device)` and `run(item, device)`; each of `lanes` processes takes its share of the items.

    `share` is the stage's part of the time beside the others' shares. `seconds` limit an item, in longer calls than
    `MINUTES` in proportion. Nothing else starts beside a stage that is `timed`.
    """

    name: str
    module: str
    share: float
    seconds: float
    lanes: int = 1
    what: str = ''
    timed: bool = True


STAGES = (
    Stage('smoke', 'benchmarks.gpu.smoke', 30, 15, min(4, CORES), 'each kernel once, against float64', timed=False),
    Stage('passes', 'benchmarks.gpu.passes', 150, 40, 1, 'forward and backward, Longhorn and fla (GLA: six configurations)'),
    Stage('tests', 'benchmarks.gpu.tests', 150, 40, min(14, CORES), 'the tests, each function once', timed=False),
    Stage('loops', 'benchmarks.gpu.loops', 30, 15, 1, "an instruction by its loop's length, dependent products, copies"),
    Stage('steps', 'benchmarks.gpu.steps', 90, 40, 1, 'training steps, memory; autotuned kernels: six configurations'),
    Stage('more_tests', 'benchmarks.gpu.more_tests', 25, 40, min(14, CORES), 'the tests, other parameter sets', timed=False),
    Stage('learning', 'benchmarks.gpu.learning', 40, 60, 1, 'small language models on equal tokens'),
    Stage(
        'tuning', 'benchmarks.gpu.tuning', 25, 60, 1, 'launch parameters that keep all bits, by time; torch.compile '
        '(not by fla_cache_autotune: it reads files for kernels that it wraps, and compares no bits)',
    ),
)


class Run:
    """One call: the stages in turn, until all items have ended or the time is up."""

    def __init__(
        self, stages: Sequence[Stage], results: Results, device: str, end: float, environment: dict[str, str],
    ) -> None:
        self.results, self.device, self.end, self.watch = results, device, end, Watch(device)
        self.lanes = {stage: [Lane(stage, device, i, environment) for i in range(stage.lanes)] for stage in stages}

    def run(self) -> None:
        waiting = [stage for stage in self.lanes if not self.results.is_finished(stage.name)]
        try:
            while waiting and time.monotonic() < self.end:
                cut = []
                for i, stage in enumerate(waiting):
                    self.prepare(stage, waiting[i + 1:], first=i == 0)
                    left = self.end - time.monotonic()
                    if left > 0 and self.run_stage(stage, left * stage.share / sum(x.share for x in waiting[i:])):
                        cut.append(stage)
                # those that their share ended go on while there is time
                waiting = cut
        finally:
            for lanes in self.lanes.values():
                for lane in lanes:
                    lane.kill()
            self.watch.stop()

    def prepare(self, stage: Stage, later: Sequence[Stage], first: bool) -> None:
        """The stage's part begins when its processes have imported. Beside it, unless it is timed, later ones import."""
        if self.device == 'meta':
            return
        self.start(stage)
        if not stage.timed:
            self.wait_for(stage)
        if first or not stage.timed:
            for each in later:
                self.start(each)
                # up to the next stage beside which others can
                if not each.timed:
                    break
        if stage.timed:
            self.wait_for(stage)

    def start(self, stage: Stage) -> None:
        for lane in self.lanes[stage]:
            if lane.process is None:
                lane.start()

    def wait_for(self, stage: Stage) -> None:
        """One that hangs takes a quarter of the time at most."""
        end = time.monotonic() + min(STARTING_SECONDS, (self.end - time.monotonic()) / 4)
        for lane in self.lanes[stage]:
            lane.ready.wait(max(0.0, end - time.monotonic()))

    def run_stage(self, stage: Stage, part: float) -> bool:
        """Seconds of `part` for the stage; whether it could go on after them."""
        started, lanes, whole = time.monotonic(), list(self.lanes[stage]), True
        known = self.results.ended[stage.name], self.results.cut[stage.name]
        for lane in lanes:
            lane.go(*known)
        while lanes and time.monotonic() < min(started + part, self.end):
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
                    lane.restart(*known)
                else:
                    self.add(stage, lane.failure())
                    lanes.remove(lane)
                    whole = False
            time.sleep(0.02)
        for lane in self.lanes[stage]:
            lane.kill()
        if cut := [lane.item for lane in lanes if lane.item is not None]:
            self.results.add({'stage': stage.name, 'cut': cut})
        finished, seconds = whole and not lanes, time.monotonic() - started
        self.results.add({'stage': stage.name, 'seconds': round(seconds, 1), 'part': round(part, 1), 'finished': finished})
        print(f'{stage.name}: {"all items" if finished else "not all items"} in {seconds:.0f} s of {part:.0f}', flush=True)
        return bool(lanes)

    def add(self, stage: Stage, record: dict) -> None:
        self.results.add({'stage': stage.name} | record | self.watch.now())
        if error := record.get('error'):
            print(f'{stage.name}: {record.get("item", "a share")}: {error.strip().splitlines()[-1][:200]}', flush=True)


def main(args: list[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks gpu', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--minutes', type=float, default=MINUTES, help='of this call')
    parser.add_argument(
        '--output', type=Path, default=Path('build/gpu'), metavar='DIR', help='results of this and of earlier calls',
    )
    parser.add_argument('--kit', type=Path, metavar='FOLDER', help='what `make gpu-kit` made')
    parser.add_argument('--stages', nargs='+', choices=[stage.name for stage in stages], help='only these')
    parser.add_argument('--device', default='cuda')
    options = parser.parse_args(args)
    end = time.monotonic() + 60 * options.minutes - LAST_SECONDS
    machine = about_machine(options.device)
    if 'error' in machine:
        print(f'nothing runs on {options.device}: {machine["error"]}')
        return 2
    environment = kit.unpack(options.kit) if options.kit else {}
    machine['versions'] |= kit.versions(environment)
    results = Results(options.output)
    results.add({'machine': machine, 'minutes': options.minutes, 'day': time.strftime('%Y-%m-%d')})
    longer = max(1.0, options.minutes / MINUTES)
    stages = [replace(stage, seconds=stage.seconds * longer) for stage in stages]
    if options.device == 'meta':
        # that compiles: no limits; tests go on where they would compare, with zeros where nothing was launched
        environment |= {'PYTHONOPTIMIZE': '1', 'MALLOC_PERTURB_': '255'}
        stages = [replace(stage, seconds=math.inf, lanes=CORES) for stage in stages]
    chosen = [stage for stage in stages if not options.stages or stage.name in options.stages]
    Run(chosen, results, options.device, end, environment).run()
    text = page.make(results.records, [(stage.name, stage.what) for stage in stages])
    results.write_page(text)
    print(text)
    lacks = options.device == 'meta' and any(record.get('compiled') for record in results.records)
    return int(lacks or any('error' in record for record in results.records))


if __name__ == '__main__':
    sys.exit(main())
