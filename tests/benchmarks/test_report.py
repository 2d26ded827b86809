"""The results page is what the committed figures say."""

from benchmarks import report


def test_the_page_is_up_to_date(capsys):
    assert report.main(['--check']) == 0, capsys.readouterr().err


def test_an_old_page_is_noticed(tmp_path, monkeypatch, capsys):
    page = tmp_path / 'results.md'
    page.write_text(report.PAGE.read_text() + 'more')
    monkeypatch.setattr(report, 'PAGE', page)
    assert report.main(['--check']) == 1
    assert 'run python -m benchmarks.report' in capsys.readouterr().err


def test_what_is_missing_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(report, 'RESULTS', tmp_path)
    assert report.page().count('Not measured.') == len(report.SECTIONS)


def test_guessing():
    """One value left is known; of two, the first answer is right half of the time and the second always."""
    assert report.guessing(1) == 1
    assert report.guessing(2) == (1 + 1.5) / 3
