"""Published timings beside what the model predicts for the same calls: how far predicted times can be trusted.

    python -m benchmarks calibrate [--only chunk_gla ...] [--set dram=700 ...] [--json FILE] [--plot FILE.png]

The points and their sources are in `benchmarks/calibration`. Packages that are not installed leave their points out; fla's
kernels are those of the version at hand. What is slow is kept in `build/calibration`, so a run that was ended goes on, and
other constants take a minute. Needs gcc, no GPU, and a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.calibration.calls import call_of, package_of
from benchmarks.calibration.points import Point, read
from benchmarks.calibration.tuning import Tuning
from benchmarks.calibration.walks import Walks
from offgpu.launches import make_driver
from offgpu.absent_device import announced
from offgpu.predict.capture import capture
from offgpu.predict.machine import MACHINES, Machine
from offgpu.predict.times import Prediction, predict_pass

KEPT = Path(__file__).parents[2] / 'build' / 'calibration'


def predict_point(point: Point, machine: Machine, tuning: Tuning, walks: Walks) -> list[Prediction]:
    """The kernels of a point's call, each with the configuration that is predicted to be the fastest."""
    call, T = call_of(point)
    while True:
        launches = capture(call, T, f'sm_{machine.capability}', choose=tuning.choose)
        parts = predict_pass(launches, machine, walks.predict)
        if tuning.learn(parts):
            tuning.save()
            return parts
