"""The results page is what the committed figures say."""

import json
import shutil

import pytest

from benchmarks.report import page as report


def test_the_page_is_up_to_date(capsys):
    assert report.main(['--check']) == 0, capsys.readouterr().err


@pytest.mark.parametrize(('name', 'old'), [('PAGE', '# Results\n'), ('README', '**Speed on a CPU.**')])
def test_an_old_page_is_noticed(name, old, tmp_path, monkeypatch, capsys):
    texts = {page: getattr(report, page).read_text() for page in ('PAGE', 'README')}
    for page, text in texts.items():
        monkeypatch.setattr(report, page, tmp_path / page)
        (tmp_path / page).write_text(text)
    assert old in texts[name]
    (tmp_path / name).write_text(texts[name].replace(old, ''))
    assert report.main(['--check']) == 1
    assert f'{tmp_path / name} differs from what the results hold: run python -m benchmarks report' in capsys.readouterr().err
    assert report.main([]) == report.main(['--check']) == 0
    assert (tmp_path / name).read_text() == texts[name]


def test_what_is_missing_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(report, 'RESULTS', tmp_path)
    assert report.page().count('Not measured.') == len(report.SECTIONS)


def test_results_of_a_gpu_come_first(tmp_path, monkeypatch):
    """As `benchmarks all` leaves them, by the device's name."""
    text = report.page()
    for path in report.RESULTS.glob('*.json'):
        shutil.copy(path, tmp_path)
    for kind in ('ops', 'model'):
        figures = json.loads((report.RESULTS / f'cpu_{kind}.json').read_text())
        figures['machine']['device'] = 'NVIDIA H200'
        (tmp_path / f'nvidia_h200_{kind}.json').write_text(json.dumps(figures))
    monkeypatch.setattr(report, 'RESULTS', tmp_path)
    page = report.page()
    assert 0 < page.index('## Operators on NVIDIA H200') < page.index('## Models on NVIDIA H200') < page.index('on a CPU')
    assert report.NO_GPU in text and report.NO_GPU not in page
    assert page.endswith(text[text.index('## Operators on a CPU'):])
