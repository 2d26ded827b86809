"""The page about the paper's Table 4 holds the committed figures, and a small measurement has all of them."""

import json

import pytest

from benchmarks.report.page import ROOT
from experiments import objectives
from experiments.report import RESULTS

REPORT = json.loads((RESULTS / 'objectives.json').read_text())
PAGE = (ROOT / 'docs' / 'objectives.md').read_text()


@pytest.mark.parametrize('name', list(objectives.tables(REPORT)))
def test_page_holds_the_figures(name):
    assert objectives.tables(REPORT)[name] in PAGE, 'run python -m experiments objectives'


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
