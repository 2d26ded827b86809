"""Commands beside an H100 that is not there: fla chooses configurations by the GPU that it finds at import."""

from __future__ import annotations

import importlib

from offgpu.absent_device import announced
from offgpu.launches import make_driver


def main(args: list[str], module: str) -> int:
    with announced(make_driver('sm_90', 'launch')):
        return importlib.import_module(module).main(args)
