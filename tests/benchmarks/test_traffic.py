"""`python -m benchmarks traffic` counts what the committed file says, on which docs and the routes of a scalar beta rest."""

import json
from pathlib import Path

import pytest

from tests import forks

COMMITTED = Path(__file__).parents[2] / 'benchmarks' / 'results' / 'traffic.json'


def by_operator(file: Path) -> dict[tuple[str, int], list[float]]:
    rows = json.loads(file.read_text())['rows']
    return {(row['operator'], row['K']): [row[x]['bytes'] for x in ('forward', 'backward')] for row in rows}


def test_committed_figures(tmp_path):
    """In a process that has no interpreter for its kernels."""
    forks.output('-m', 'benchmarks', 'traffic', '--json', tmp_path / 'traffic.json')
    now = by_operator(tmp_path / 'traffic.json')
    assert by_operator(COMMITTED) == {key: pytest.approx(value, abs=0.01) for key, value in now.items()}
