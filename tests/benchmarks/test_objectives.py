"""The page about the paper's Table 4 holds the committed figures, and a small measurement has all of them."""

import json
import re

import pytest

from benchmarks.experiments import objectives
from benchmarks.report.page import RESULTS, ROOT

REPORT = json.loads((RESULTS / 'objectives.json').read_text())
PAGE = (ROOT / 'docs' / 'objectives.md').read_text()


@pytest.mark.parametrize('name', list(objectives.tables(REPORT)))
def test_page_holds_the_figures(name):
    assert objectives.tables(REPORT)[name] in PAGE, 'run python -m benchmarks.objectives'


def test_page_has_no_other_figures():
    """Every row of a table whose first figure is a number is one of the report's."""
    held = '\n'.join(objectives.tables(REPORT).values()).splitlines()
    rows = [line for line in PAGE.splitlines() if re.match(r'\|[^|]*\| [<\d]', line)]
    assert len(rows) > 40
    assert set(rows) <= set(held)


def test_committed_figures():
    """What the page says of them in words."""
    rows = {row['model']: row for row in REPORT['table']}
    for row in rows.values():
        assert row['update_distance']['largest'] <= 1e-10 and row['op_distance']['largest'] <= 1e-6
    assert rows['Griffin']['printed'] is None
    for name in ('LA', 'RetNet', 'Longhorn, Theorem 3.1'):
        assert rows[name]['printed']['update_distance']['largest'] <= 1e-10
    assert rows['GLA']['printed']['update_distance']['median'] > 1
    assert 0.01 < rows['Longhorn, diagonal']['printed']['update_distance']['median'] < 0.1
    for row in REPORT['diagonal']:
        # K = 1 is exact, and a larger key removes less and less of the old recall, close to 3 / (K + 2)
        assert (row['distance']['largest'] <= 1e-10) == (row['K'] == 1)
        assert row['erased'] == pytest.approx(3 / (row['K'] + 2), rel=0.15)
        assert row['missed']['low'] >= -1e-10
    for row in REPORT['repeats']:
        assert row['exact'] <= 1 and row['diagonal'] <= row['K'] + 1e-9


@pytest.mark.slow
def test_measures(tmp_path, monkeypatch, capsys):
    measure = objectives.measure
    monkeypatch.setattr(objectives, 'measure', lambda: measure((1, 3), (0.5, 5.0), N=3, T=5))
    path, picture = tmp_path / 'objectives.json', tmp_path / 'objectives.png'
    objectives.main(['--json', str(path), '--plot', str(picture)])
    report = json.loads(path.read_text())
    assert [(row['K'], row['beta_k2']) for row in report['diagonal']] == [(1, 0.5), (1, 5.0), (3, 0.5), (3, 5.0)]
    assert set(report) == set(REPORT) and picture.stat().st_size > 1000
    out = capsys.readouterr().out
    assert all(text in out for text in objectives.tables(report).values())


def test_the_same_figures_again():
    again = [objectives.measure_diagonal(3, 1.0, N=3, T=5) for _ in range(2)]
    assert again[0] == again[1]
