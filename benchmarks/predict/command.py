"""Predicted times of the kernels on a GPU, without one, what their cycles go to, and how far off they may be.

fla chooses configurations by the GPU that it finds at import, so it is imported in here.
"""

from __future__ import annotations

import importlib

from offgpu.absent_device import announced
from offgpu.launches import make_driver


def main(args: list[str] | None = None, module: str = 'benchmarks.predict.run') -> int:
    with announced(make_driver('sm_90', 'launch')):
        return importlib.import_module(module).main(args)
