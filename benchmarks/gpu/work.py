"""What a process of a stage does: its share of the items, each told when it begins and ends."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType


def compilations() -> list[str]:
    """The names of kernels that Triton compiles in this process, filled in as they come."""
    from triton import knobs

    names: list[str] = []

    def note(*, src, cache_hit: bool, **_) -> None:
        if not cache_hit:
            names.append(getattr(src, 'fn', src).__name__)

    knobs.compilation.listener = note
    return names


def work(plan: dict, tell: Callable[[dict], None]) -> None:
    """Run the items of `plan`'s share that have not ended."""
    module, device = importlib.import_module(plan['module']), plan['device']
    (index, shares), ended, compiled = plan['share'], {*plan['ended']}, compilations()
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

        work(plan, tell)


if __name__ == '__main__':
    main()
