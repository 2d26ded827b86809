"""The project's tests on the device, each function once; each is an item of its own, with its error."""

from __future__ import annotations

import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout

import pytest

from benchmarks.gpu.filling import standing_for_gpu
from benchmarks.gpu.passes import few_configurations

# whose kernels are Inductor's, and in no kit
COMPILED = 'tests/torch_compile/test_layer.py'
# what tells most of the kernels first
PATHS = (
    'tests/ops', 'tests/layers', 'tests/integration/test_packing.py', 'tests/models/test_generation.py',
    'tests/models/test_capture.py', 'tests/models/test_causal_lm.py', 'tests/models/test_cache.py',
    'tests/models/test_gate.py', COMPILED,
)


class Reporter:
    """A plugin of pytest: keeps those of `chosen` that have not ended, and tells when each begins and how it ends."""

    def __init__(self, chosen: list[str], tell: Callable[[dict], None], seen: dict[str, list[str]], launches: bool) -> None:
        self.chosen, self.tell, self.seen, self.launches = chosen, tell, seen, launches

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {item.nodeid: item for item in items}
        items[:] = [known[name] for name in self.chosen if name in known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds, self.error, self.outcome = 0.0, '', 'passed'
        for names in self.seen.values():
            names.clear()
        self.tell({'begun': nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed:
            self.outcome = 'failed'
            # what was not launched left nothing to compare
            self.error += f'{report.when}: {report.longreprtext}\n' if self.launches else ''
        elif report.skipped:
            self.outcome = 'skipped'

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        record = {'item': nodeid, 'rows': [{'outcome': self.outcome}], 'seconds': round(self.seconds, 2)}
        record |= {name: [*names] for name, names in self.seen.items()}
        self.tell(record | ({'error': self.error} if self.error else {}))


class Collector:
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


def arguments(device: str) -> list[str]:
    found = [path for path in PATHS if os.path.exists(path) and (device != 'meta' or path != COMPILED)]
    plugins = ('-p', 'no:cacheprovider', '-p', 'no:xdist', '-p', 'no:timeout')
    # what a test prints is kept if it ends the process; on meta, nothing is compared
    more = ('--assert=plain', '--device', 'cpu:0') if device == 'meta' else ('--device', device)
    return [*found, '-q', '-s', '--continue-on-collection-errors', *plugins, '-m', 'not slow', *more]


def run_pytest(device: str, plugin: object, *more: str) -> None:
    with standing_for_gpu() if device == 'meta' else nullcontext(), few_configurations():
        pytest.main([*arguments(device), *more], [plugin])


def collected(device: str) -> list[str]:
    collector = Collector()
    with redirect_stdout(io.StringIO()):
        run_pytest(device, collector, '--collect-only')
    return sorted(collector.names, key=lambda name: name.startswith(COMPILED))


def by_turn(names: list[str]) -> tuple[list[str], list[str]]:
    """The first parameter set of every function; then the second of each, the third, and so on."""
    seen: Counter[str] = Counter()
    turns: defaultdict[int, list[str]] = defaultdict(list)
    for name in names:
        function = name.partition('[')[0]
        turns[seen[function]].append(name)
        seen[function] += 1
    first, *others = turns.values() or [[]]
    return first, [name for turn in others for name in turn]


def items(device: str) -> list[str]:
    return by_turn(collected(device))[0]


def run_all(items: list[str], device: str, tell: Callable[[dict], None], seen: dict[str, list[str]]) -> None:
    if items:
        run_pytest(device, Reporter(items, tell, seen, launches=device != 'meta'))
