"""What an autotuner would choose, by predicted times: found once for each key, as on a GPU at the first call with it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import triton
from triton.runtime.autotuner import Config

from benchmarks.calibration.walks import NotKeptError, Walks
from offgpu.predict.capture import Pass, capture
from offgpu.predict.machine import Machine
from offgpu.predict.times import Prediction, predict_pass

# configurations that are tried first, from the first to the last one; with the best of another key of the kernel, so many
FIRST, FIRST_WITH_BEST = 4, 2
# kernels that take less of a pass are left at the best of these, and those that take at most so much of what moving their
# tensors takes
SMALL, NEAR = 0.1, 1.1
# of a known key, those that are tried for each call
BEST = 1


def entries(config: Config) -> dict[str, int]:
    return {**config.kwargs, 'num_warps': config.num_warps, 'num_stages': config.num_stages}


def neighbours(best: Config, configs: list[Config]) -> list[Config]:
    """Those that differ from `best` in one entry, by one step of what that entry may be."""
    values = {name: sorted({entries(c)[name] for c in configs if name in entries(c)}) for name in entries(best)}
    out = []
    for c in configs:
        differ = [name for name, x in entries(best).items() if entries(c).get(name) != x]
        if len(differ) == 1 and differ[0] in entries(c):
            steps = values[differ[0]]
            if abs(steps.index(entries(c)[differ[0]]) - steps.index(entries(best)[differ[0]])) == 1:
                out.append(c)
    return out


class Tuning:
    """`choose` for :func:`offgpu.launches.rehearsal`; `seconds` of the configurations that were tried, by key.

    They are kept in `folder` for each Triton apart, which compiles other code and names configurations in other ways.
    """

    def __init__(self, folder: Path, alone: bool = False) -> None:
        self.path, self.alone = folder / f'tuning-{triton.__version__}.json', alone
        self.seconds: dict[str, dict[str, float]] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.settled = set(self.seconds)
        self.configs: dict[str, list[Config]] = {}
        # the best of other keys of the kernel: where it is the best here too, the minimum stays
        self.related: dict[str, set[str]] = {}

    def choose(self, tuned_for: str, configs: list[Config]) -> list[Config]:
        self.configs[tuned_for] = configs
        tried = self.seconds.get(tuned_for)
        if tried is None and self.alone:
            raise NotKeptError(f'no configuration of {tuned_for}')
        if tried is None:
            related = [x for key, x in self.seconds.items() if key.split()[:2] == tuned_for.split()[:2]]
            best = {min(x, key=x.__getitem__) for x in related}
            self.related[tuned_for], known = best, [c for c in configs if str(c) in best]
            count = FIRST_WITH_BEST if known else FIRST
            spread = configs[::max((len(configs) - 1) // (count - 1), 1)][:count]
            return known + [c for c in spread if c not in known]
        ranked = sorted((c for c in configs if str(c) in tried), key=lambda c: tried[str(c)])
        if tuned_for in self.settled:
            return ranked[:BEST]
        return ranked[:1] + self.untried(tuned_for)

    def untried(self, tuned_for: str) -> list[Config]:
        """Neighbours of the best that were not tried: none where the minimum stays."""
        tried, configs = self.seconds[tuned_for], self.configs[tuned_for]
        best = min((c for c in configs if str(c) in tried), key=lambda c: tried[str(c)])
        return [c for c in neighbours(best, configs) if str(c) not in tried]

    def learn(self, parts: list[Prediction]) -> bool:
        """Keep what was tried; whether the minimum of every kernel stays."""
        total = sum(p.seconds for p in parts)
        done = True
        for p in parts:
            if not p.tuned_for or p.tuned_for in self.settled:
                continue
            known = self.seconds.setdefault(p.tuned_for, {})
            # what was launched and is not among them did not fit
            chosen = self.choose(p.tuned_for, self.configs[p.tuned_for]) if known else []
            known |= {str(c): float('inf') for c in chosen if str(c) not in p.tried}
            known |= p.tried
            stays = min(known, key=known.__getitem__) in self.related.get(p.tuned_for, ()) or p.seconds <= NEAR * p.least
            if stays or p.seconds < SMALL * total or not self.untried(p.tuned_for):
                self.settled.add(p.tuned_for)
            else:
                done = False
        return done

    def save(self) -> None:
        part = self.path.with_suffix(f'.{os.getpid()}')
        part.write_text(json.dumps({k: x for k, x in self.seconds.items() if k in self.settled}, indent=1))
        part.replace(self.path)


def predict_tuned(call: Pass, T: int, machine: Machine, tuning: Tuning, walks: Walks) -> list[Prediction]:
    """The kernels of a call, each with the configuration that is predicted to be the fastest."""
    while True:
        launches = capture(call, T, f'sm_{machine.capability}', choose=tuning.choose)
        parts = predict_pass(launches, machine, walks.predict)
        if tuning.learn(parts):
            tuning.save()
            return parts
