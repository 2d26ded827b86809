"""The pages of results are what the committed figures say, and every committed picture can be drawn again."""

import json

import pytest

from benchmarks.report import page
from benchmarks.report.pictures import DRAW, pictures
from lab.experiments import report
from lab.experiments.pictures import DRAW as EXPERIMENTS

PICTURES = pictures(DRAW, page.RESULTS) | pictures(EXPERIMENTS, report.RESULTS)


@pytest.mark.parametrize('module', [page, report])
def test_the_page_is_up_to_date(module, capsys):
    assert module.main(['--check']) == 0, capsys.readouterr().err


@pytest.mark.parametrize('path', PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_drawn(path, tmp_path):
    PICTURES[path](json.loads(path.with_suffix('.json').read_text()), tmp_path / 'picture.png')
    assert (tmp_path / 'picture.png').read_bytes().startswith(b'\x89PNG')
