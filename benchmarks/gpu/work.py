"""What a process of a stage does: its share of the items, each told when it begins and ends."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

# of which a machine may have none
OPTIONAL = ('mamba_ssm', 'vllm')
LAUNCHER = 'a launcher'


def compilations(launched: Callable[[object, dict], None] | None = None) -> list[str]:
    """The names of kernels that Triton compiles in this process, and of launchers, filled in as they come.

    `launched` is called for each kernel that is compiled or found in the cache.
    """
    from triton import knobs
    from triton.runtime import build

    names: list[str] = []
    compile_c = build._build

    def note(*, src: Any, metadata: dict, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(getattr(src, 'fn', src).__name__)
        if launched:
            launched(src, metadata)

    def build_launcher(*args: Any) -> str:
        names.append(LAUNCHER)
        return compile_c(*args)

    knobs.compilation.listener, build._build = note, build_launcher
    return names


def work(plan: dict, tell: Callable[[dict], None], compiled: list[str]) -> None:
    """Run the items of `plan`'s share that have not ended."""
    module, device = importlib.import_module(plan['module']), plan['device']
    (index, shares), ended = plan['share'], {*plan['ended']}
    mine = [item for item in module.items(device)[index::shares] if item not in ended]
    if hasattr(module, 'run_all'):
        module.run_all(mine, device, tell, compiled)
    else:
        for item in mine:
            tell({'begun': item})
            tell(outcome(module, item, device, compiled))
    tell({'done': True})


def outcome(module: ModuleType, item: str, device: str, compiled: list[str]) -> dict:
    """The record of one item: its rows, or its rows up to an error."""
    started, record = time.perf_counter(), {'item': item, 'rows': []}
    compiled.clear()
    try:
        for row in module.run(item, device):
            record['rows'].append(row)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            record['error'] = traceback.format_exc()
        record['rows'].append({'not installed': error.name})
    except Exception:
        # other packages' operators may raise anything
        record['error'] = traceback.format_exc()
    return record | {'seconds': round(time.perf_counter() - started, 2), 'compiled': list(compiled)}


def main() -> None:
    plan = json.load(sys.stdin)
    with os.fdopen(plan['rows'], 'w', encoding='utf-8') as file:
        def tell(record: dict) -> None:
            file.write(json.dumps(record) + '\n')
            file.flush()

        if plan['device'] == 'meta':
            from benchmarks.gpu.filling import absent_gpu as gpu
        else:
            gpu = nullcontext
        with gpu() as launched:
            work(plan, tell, compilations(launched))


if __name__ == '__main__':
    main()
