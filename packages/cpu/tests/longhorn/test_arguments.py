"""Compiled loops check no bounds: whatever a tensor's size, dtype or memory, they read nothing beyond it."""

import json

import pytest

from tests import forks


@pytest.mark.slow
def test_walk_over_all_arguments_of_all_loops():
    *calls, unused = map(json.loads, forks.output('-m', 'packages.cpu.tests.longhorn.walk').splitlines())
    assert not unused
    assert {name: (wrong, died) for name, _, wrong, died in calls if wrong or died} == {}
    assert sum(number for _, number, *_ in calls) > 500
