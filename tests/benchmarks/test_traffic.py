"""`python -m benchmarks traffic`: what counts, and what docs/exact.md and the routes of a scalar beta take from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def bytes_moved(tmp_path_factory) -> dict[tuple[str, int], tuple[float, float]]:
    """(forward, backward) by operator and K, from a process that has no interpreter for its kernels."""
    file = tmp_path_factory.mktemp('traffic') / 'traffic.json'
    forks.run('-m', 'benchmarks', 'traffic', '--json', file).check_returncode()
    return by_operator(file)


def by_operator(file: Path) -> dict[tuple[str, int], tuple[float, float]]:
    rows = json.loads(file.read_text())['rows']
    return {(row['operator'], row['K']): (row['forward']['bytes'], row['backward']['bytes']) for row in rows}


def test_counts(bytes_moved):
    """A forward reads v and beta and writes o; the exact one of a scalar step little else."""
    assert all(forward >= (4 if 'scalar' in name or 'chunk' in name else 6) for (name, _), (forward, _) in bytes_moved.items())
    assert bytes_moved['Longhorn exact scalar', 16][0] < 5


def test_committed_figures(bytes_moved):
    committed = by_operator(ROOT / 'benchmarks' / 'results' / 'traffic.json')
    assert committed == {key: pytest.approx(value, abs=0.01) for key, value in bytes_moved.items()}


def test_the_exact_update_moves_less_than_the_delta_rule(bytes_moved):
    for K in (16, 32, 64, 128):
        assert sum(bytes_moved['Longhorn exact scalar', K]) < 0.75 * sum(bytes_moved['chunk_delta_rule', K])
