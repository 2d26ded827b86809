"""What a process of a stage does: its share of the items, each told when it begins and ends."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any


def compilations(launched: Callable[[object, dict], object] | None) -> dict[str, list[str]]:
    """What Triton does in this process, filled in as it comes: kernels and launchers that it compiles, by name.

    With `launched`, which is called for each kernel, also the folders of the cache that are used.
    """
    from triton import knobs
    from triton.runtime import build
    from triton.runtime.cache import get_cache_manager

    seen: dict[str, list[str]] = {'compiled': []} | ({'used': []} if launched else {})
    compile_c = build._build

    def note(*, src: Any, metadata: dict, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seen['compiled'].append(getattr(src, 'fn', src).__name__)
        if launched:
            seen['used'].append(os.path.basename(get_cache_manager(metadata['hash']).cache_dir))
            launched(src, metadata)

    def build_launcher(*args: Any) -> str:
        seen['compiled'].append('a launcher')
        return compile_c(*args)

    knobs.compilation.listener, build._build = note, build_launcher
    return seen


def tune_quickly() -> None:
    """Configurations of autotuned kernels are timed for 25 ms each, not 125: there are hundreds."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = property(lambda self: partial(do_bench, warmup=5, rep=20))


def work(
    plan: dict, tell: Callable[[dict], None], read: Callable[[], str], launched: Callable | None = None,
) -> None:
    """Run the items of `plan`'s share that have not ended, when the line comes that names those."""
    module, device = importlib.import_module(plan['module']), plan['device']
    (index, shares), seen = plan['share'], compilations(launched)
    items = module.items(device)[index::shares]
    tell({'ready': True})
    if not (line := read()):
        # nobody is there any more
        return
    ended, cut = map(set, json.loads(line))
    mine = sorted((item for item in items if item not in ended), key=lambda item: item in cut)
    if hasattr(module, 'run_all'):
        module.run_all(mine, device, tell, seen)
    else:
        for item in mine:
            tell({'begun': item})
            tell(outcome(module, item, device, seen))
    tell({'done': True})


def outcome(module: ModuleType, item: str, device: str, seen: dict[str, list[str]]) -> dict:
    """The record of one item: its rows, or its rows up to an error."""
    started, record = time.perf_counter(), {'item': item, 'rows': []}
    for names in seen.values():
        names.clear()
    try:
        for row in module.run(item, device):
            record['rows'].append(row)
    except Exception:
        # other packages' operators may raise anything
        record['error'] = traceback.format_exc()
    return record | {'seconds': round(time.perf_counter() - started, 2)} | {name: [*names] for name, names in seen.items()}


def main() -> None:
    if 'PRETEND_CUDA' in os.environ:
        # before Triton, or offgpu's fake device does not interpret its kernels
        import torch  # noqa: F401

    plan = json.loads(sys.stdin.readline())
    faulthandler.register(signal.SIGUSR1)
    with os.fdopen(plan['rows'], 'w', encoding='utf-8') as file:
        def tell(record: dict) -> None:
            file.write(json.dumps(record) + '\n')
            file.flush()

        if plan['device'] == 'meta':
            from benchmarks.gpu.filling import absent_gpu as gpu
        else:
            gpu = nullcontext
            tune_quickly()
        with gpu() as launched:
            work(plan, tell, sys.stdin.readline, launched)


if __name__ == '__main__':
    main()
