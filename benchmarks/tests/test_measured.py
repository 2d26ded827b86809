"""Measured times carry the commit they are of, and pages that cite older kernels' say so beside today's prediction."""

import json
import subprocess

import pytest

from benchmarks.gpu.results import Results
from benchmarks.measure import machine
from benchmarks.report import measured

FILES = [measured.RESULTS / 'h200_passes.json', *measured.RESULTS.glob('gpu_*.json')]
IS_CHECKOUT = (machine.ROOT / '.git').exists()


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_rows_are_of_a_commit(path):
    """The digest is that of the commit's kernels; without a difference since, they are the kernels of now."""
    about = json.loads(path.read_text())['machine']
    assert about['device'] and about['commit'] and about['versions']['torch'] and about['versions']['triton']
    commit = about['commit'].rstrip('+')
    if IS_CHECKOUT and not subprocess.run(['git', 'cat-file', '-e', commit], cwd=machine.ROOT).returncode:
        assert about['kernels'] == machine.digest_at(commit)
        same = not subprocess.run(['git', 'diff', '--quiet', commit, '--', machine.KERNELS], cwd=machine.ROOT).returncode
        assert not same or about['kernels'] == machine.digest_of_kernels()


def test_predictions_are_of_the_kernels_of_now():
    report = json.loads((measured.RESULTS / 'predicted.json').read_text())
    again = 'run `python -m benchmarks predict --pages`, then `python -m benchmarks measured`, which says what pages must say'
    assert report['machine']['kernels'] == machine.digest_of_kernels(), again


def test_the_table_says_which_rows_are_of_kernels_of_now():
    text = measured.make_table()
    assert text in measured.NOTEBOOK.read_text(), 'run `python -m benchmarks measured`'
    of_now = [line.split(' | ')[8] for line in text.splitlines()[2:]]
    assert len(of_now) == len(measured.measured())
    # of 26 November, before the exact kernels took chunks of 8 tokens
    assert '| exact_fwd | 16 | 8 x 2048 x 4096 | 0.44 (0.42 to 0.48) |  | NVIDIA H200 |' in text
    assert '| 4d0b22b, 2026-11-26 | no |' in text


@pytest.mark.parametrize('path', measured.PAGES, ids=lambda path: path.relative_to(measured.ROOT).as_posix())
def test_pages(path):
    assert not measured.problems(path.read_text())


OLD, NEW = ('exact', 16), ('diagonal', 16)
PAGES = {
    'exact 1.01 ms predicted, 1.56 ms measured on older kernels, on an H200': None,
    'exact 1.01 ms predicted, and diagonal 2.19 ms predicted: 2.2 times as long': None,
    'On a CPU exact takes 1.5 times as long as on a GPU': None,
    'exact takes 1.56 ms': 'is by older kernels',
    'exact and diagonal take 1.56 and 3.46 ms': 'is by older kernels',
    'exact 1.56 ms measured': '1.56 ms measured: known are',
    'exact 1.56 ms measured on older kernels': '"1.01 ms predicted"',
    # the prediction is of the other form
    'exact 1.56 ms measured on older kernels, 2.19 ms predicted': '"1.01 ms predicted"',
    'exact 1.02 ms predicted': '1.02 ms predicted: known are',
    'exact 1.10 ms measured': '1.10 ms measured: known are',
    'on an H200 diagonal takes 3.5 times as long': '3.5 times as long: known are',
    '| exact | 1.01 ms predicted |\n| the same | 1.56 ms measured on older kernels |': '"1.01 ms predicted"',
}


@pytest.mark.parametrize('text', PAGES)
def test_what_a_page_may_say(text, monkeypatch):
    monkeypatch.setattr(measured, 'timings', lambda now: {} if now else {OLD: 1.5597, NEW: 3.4556})
    monkeypatch.setattr(measured, 'forecasts', lambda: {OLD: 1.011, NEW: 2.189})
    found, wanted = measured.problems(text), PAGES[text]
    assert any(wanted in problem for problem in found) if wanted else not found


def test_a_run_becomes_a_file(tmp_path, monkeypatch):
    """On a machine without git, the commit is that of the checkout that has the same kernels; its rows are those of now."""
    monkeypatch.setattr(measured, 'RESULTS', tmp_path)
    monkeypatch.setattr(measured, 'git', lambda *args: 'abc1234\n' if args[0] == 'rev-parse' else '')
    about = {'device': 'NVIDIA X', 'versions': {'torch': '1', 'triton': '2'}, 'commit': None}
    results = Results(tmp_path / 'run')
    results.add({'machine': about | {'kernels': machine.digest_of_kernels()}, 'day': '2026-12-01'})
    with pytest.raises(ValueError, match='DIR must have the results of a run that timed passes, got'):
        measured.add(tmp_path / 'run')
    for item, rows in {
        'exact, gate per head, K = 16, 8 x 2048 x 4096': [{'pass': 'fwd', 'kernels_ms': 0.3, 'ms': 0.4}],
        'exact, packed, K = 64, 1 x 16384 x 4096': [{'pass': 'bwd', 'kernels_ms': 1.25, 'ms': 1.5}],
        'chunk_gated_delta_rule, K = 64, 8 x 2048 x 4096': [{'pass': 'bwd', 'refused by fla': 'its issue'}],
        'fused_recurrent_kda, K = 64, 64 x 1 x 4096': [{'pass': 'fwd', 'ms': 0.1}],
    }.items():
        results.add({'stage': 'passes', 'item': item, 'rows': rows})
    results.add({'stage': 'passes', 'item': 'diagonal, K = 16, 8 x 2048 x 4096', 'error': 'did not end'})
    report = json.loads(measured.add(tmp_path / 'run').read_text())
    assert report['machine']['commit'] == 'abc1234'
    assert [(row['pass'], row['K'], row['B'], row['T'], row['V']) for row in report['rows']] == [
        ('exact_head_gate_fwd', 16, 8, 2048, 4096), ('exact, packed_bwd', 64, 1, 16384, 4096),
        ('fused_recurrent_kda_fwd', 64, 64, 1, 4096),
    ]
    (tmp_path / 'h200_passes.json').write_text(json.dumps(report | {'machine': report['machine'] | {'kernels': 'other'}}))
    (tmp_path / 'predicted.json').write_text('{"rows": []}')
    measured.measured.cache_clear()
    measured.predicted.cache_clear()
    try:
        assert [row['now'] for row in measured.measured()] == [False] * 3 + [True] * 3
        assert '| 1.50 | 1.25 | NVIDIA X | 1, 2 | abc1234, 2026-12-01 | yes |' in measured.make_table()
        assert "| 0.10 |  | NVIDIA X | 1, 2 | abc1234, 2026-12-01 | fla's |" in measured.make_table()
    finally:
        measured.measured.cache_clear()
        measured.predicted.cache_clear()
