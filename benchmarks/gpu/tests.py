"""The project's tests on the device, one of each function first; each is an item of its own, with its whole error."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout

import pytest

# what tells most of the kernels first
PATHS = (
    'tests/ops', 'tests/layers', 'tests/integration/test_packing.py', 'tests/models/test_generation.py',
    'tests/models/test_capture.py', 'tests/models/test_causal_lm.py', 'tests/models/test_cache.py',
    'tests/models/test_gate.py', 'tests/torch_compile/test_layer.py',
)


class Reporter:
    """A plugin of pytest: keeps those of `chosen` that have not ended, and tells when each begins and how it ends."""

    def __init__(self, chosen: list[str], tell: Callable[[dict], None], seen: dict[str, list[str]]) -> None:
        self.chosen, self.tell, self.seen = chosen, tell, seen

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = {item.nodeid: item for item in items}
        items[:] = [known[name] for name in self.chosen if name in known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.seconds, self.error, self.outcome = 0.0, '', 'passed'
        self.seen['compiled'].clear()
        self.tell({'begun': nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed:
            self.error += f'{report.when}: {report.longreprtext}\n'
        elif report.skipped:
            self.outcome = 'skipped'

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        record = {'item': nodeid, 'rows': [{'outcome': self.outcome}], 'seconds': round(self.seconds, 2)}
        self.tell(record | {'compiled': [*self.seen['compiled']]} | ({'error': self.error} if self.error else {}))


class Collector:
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


def arguments(device: str) -> list[str]:
    found = [path for path in PATHS if os.path.exists(path)]
    plugins = ('-p', 'no:cacheprovider', '-p', 'no:xdist', '-p', 'no:timeout')
    # what a test prints is kept if it ends the process
    return [*found, '-q', '-s', *plugins, '-m', 'not slow', '--device', device]


def items(device: str) -> list[str]:
    if device == 'meta':
        return []
    collector = Collector()
    with redirect_stdout(io.StringIO()):
        pytest.main([*arguments(device), '--collect-only'], [collector])
    return ones_first(collector.names)


def ones_first(names: list[str]) -> list[str]:
    """The first parameter set of every test, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    turns = []
    for name in names:
        function = name.partition('[')[0]
        turns.append(seen[function])
        seen[function] += 1
    return [name for _, name in sorted(zip(turns, names, strict=True), key=lambda pair: pair[0])]


def run_all(items: list[str], device: str, tell: Callable[[dict], None], seen: dict[str, list[str]]) -> None:
    if items:
        pytest.main(arguments(device), [Reporter(items, tell, seen)])
