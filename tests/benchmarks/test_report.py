"""The results page is what the committed figures say."""

import json
import shutil

import pytest

from benchmarks.experiments.mqar import best_runs, grid_cells
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
    assert f'{tmp_path / name} differs from what the results hold: run python -m benchmarks.report' in capsys.readouterr().err
    assert report.main([]) == report.main(['--check']) == 0
    assert (tmp_path / name).read_text() == texts[name]


def test_what_is_missing_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(report, 'RESULTS', tmp_path)
    assert report.page().count('Not measured.') == len(report.SECTIONS)


def test_results_of_a_gpu_come_first(tmp_path, monkeypatch):
    """As `benchmarks.all` leaves them, by the device's name."""
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


def test_guessing():
    """One value left is known; of two, the first answer is right half of the time and the second always."""
    assert report.guessing(1) == 1
    assert report.guessing(2) == (1 + 1.5) / 3


def test_ablations_are_differences_by_seed():
    mixers = dict(zip(['diagonal', 'scalar beta', 'exact', 'diagonal, normalised keys', 'exact, normalised keys'],
                      [0.5, 0.25, 0.75, 0.5, 1], strict=True))
    seeds = {0: 0, 1: 0.125}
    recalls = {'runs': [
        {'cell': {'mixer': mixer, 'seed': seed, 'seq_len': 32, 'hidden_size': 8}, 'history': [(1, 0)],
         'recall': x + more * (mixer == 'exact')} for mixer, x in mixers.items() for seed, more in seeds.items()
    ]}
    losses = {'setting': {'block_size': 16}, 'runs': [
        {'model': f'Longhorn, {mixer}', 'seed': seed, 'loss': x} for mixer, x in mixers.items() for seed in seeds
    ]}
    long = {'block_size': 16, 'runs': [
        run | {'spans': [{'end': 16, 'loss': 9}, {'end': 64, 'loss': 2 * run['loss']}]} for run in losses['runs']
    ]}
    lines = report.ablations(recalls, losses, long).split('\n\n')[2].splitlines()
    assert lines[0] == '| change | recall, 32 tokens, width 8 | loss, 16 tokens | loss, up to 64 tokens |'
    assert lines[2].split(' | ')[1:3] == ['-25.0 (-25.0 to -25.0)', '-0.2500 (-0.2500 to -0.2500)']
    assert lines[3].split(' | ')[1] == '+31.2 (+25.0 to +37.5)'
    assert lines[5].split(' | ')[1::2] == ['+18.8 (+12.5 to +25.0)', '+0.5000 (+0.5000 to +0.5000) |']


def test_what_the_ablations_say():
    recalls, losses, extrapolated = (
        json.loads((report.RESULTS / f'{name}.json').read_text()) for name in ('mqar_small', 'lm_small', 'extrapolation')
    )
    changes = report.differences(recalls, losses, extrapolated)
    scalar, exact, diagonal_keys, exact_keys = changes.values()
    short, long = ('recall, 32 tokens, width 32', 'recall, 64 tokens, width 32')
    trained, past = ('loss, 128 tokens', 'loss, up to 2048 tokens')
    for figures in changes.values():
        assert all(abs(x) < 3 for column, xs in figures.items() if column.endswith('width 64') for x in xs)
        assert abs(sum(figures[trained]) / 3) < 0.01
    assert min(exact[short]) > 0 > max(exact[past])
    assert sum(x > 0 for x in exact[long]) == 2
    assert max(diagonal_keys[short] + diagonal_keys[long] + exact_keys[long]) < 0
    assert min(diagonal_keys[past] + exact_keys[past]) > 0
    assert sum(scalar[short]) > 0 and sum(scalar[long]) > 0
    assert all(min(scalar[column]) < 0 < sum(scalar[column]) for column in (trained, past))
    assert all(run['recall'] > 0.999 for run in best_runs(recalls['runs']) if run['cell']['mixer'] == 'attention')
    for runs, loss in (
        (losses['runs'], lambda run: run['loss']), (extrapolated['runs'], lambda run: run['spans'][-1]['loss']),
    ):
        means = {name: sum(map(loss, some)) for name, some in report.by_model(runs)}
        assert max(means, key=means.get) == 'attention'


def test_what_the_recall_table_says():
    """All runs, and the rule of the choice; RATES says what that choice hides."""
    recalls = json.loads((report.RESULTS / 'mqar_small.json').read_text())
    found = {}
    for run in recalls['runs']:
        cell = run['cell']
        if cell['hidden_size'] == 32:
            key = cell['mixer'], cell['seq_len'], cell['learning_rate']
            found.setdefault(key, []).append(run['recall'])
    assert all(len(x) == 3 for x in found.values())
    for length, rate, ahead in ((32, 0.0046, 'exact'), (32, 0.01, 'diagonal'), (64, 0.0046, 'diagonal'), (64, 0.01, 'exact')):
        assert max(('diagonal', 'exact'), key=lambda mixer: sum(found[mixer, length, rate])) == ahead
    failed = {key[1:]: min(x) for key, x in found.items() if key[0] == 'attention' and min(x) < 0.999}
    assert {key: f'{x:.0%}' for key, x in failed.items()} == {(32, 0.01): '36%', (64, 0.01): '14%'}
    text = report.recall_by_width(recalls)
    assert report.RULE in text and report.RATES in text
    cells = [report.shares(found['exact', 64, rate]) for rate in (0.0046, 0.01)]
    assert f'| exact | 1 | 64 | 32 | {cells[0]} | {cells[1]} | 0.01 | 87.3% (69.1% to 98.6%) | 3 |' in text


def test_what_two_layers_need():
    """Every run is a cell of the setting, and shows what the text says."""
    found = json.loads((report.RESULTS / 'mqar_depth.json').read_text())
    cells = grid_cells(found['setting'])
    assert all(run['cell'] in cells for run in found['runs'])
    histories = {run['cell']['change']: run['history'] for run in found['runs']}
    for change in ('2 layers', '2 layers, rate 0.001', '2 layers, branches x0.1'):
        assert histories[change][-1][0] == 600 and max(recall for _, recall in histories[change]) < report.LEFT
    left = {name: next((step for step, recall in x if recall > report.LEFT), 10**6) for name, x in histories.items()}
    assert left['1 layer'] < left['2 layers, embeddings x10'] <= 350
    learned, = (run for run in found['runs'] if run['cell']['steps'] == 1500)
    assert learned['cell']['num_hidden_layers'] == 2 and learned['recall'] > 0.99
    plain = found['plain']
    differences = [abs(x - y) for x, y in zip(plain['ours'], plain['plain'], strict=True)]
    assert max(differences) == plain['largest_difference'] < 1e-4
    assert report.guessing(8) < report.LEFT
