"""The models' benchmark: every model has a row, what runs has all figures, and what can't says why."""

import json

from benchmarks.models import run as model

TINY = [
    '--device', 'cpu', '--hidden_size', '32', '--blocks', '1', '--batch_size', '1', '--seq_len', '16', '--prompts', '8', '16',
    '--new_tokens', '2', '--seconds', '0',
]


def test_rows(tmp_path):
    path, plot = tmp_path / 'model.json', tmp_path / 'model.png'
    model.main([*TINY, '--json', str(path), '--plot', str(plot)])
    report = json.loads(path.read_text())
    rows = {row['model']: row for row in report['rows']}
    assert list(rows) == [row.name for row in model.MODELS]
    ran = {name: row for name, row in rows.items() if row['status'] == 'ok'}
    assert ran.keys() >= {'Longhorn', 'Longhorn, exact', 'GLA, attn_mode=longhorn', 'Transformer', "transformers' Mamba"}
    for row in ran.values():
        assert row['parameters'] > 0 and row['training']['tokens_per_s'] > 0
        assert [x['prompt'] for x in row['generation']] == [8, 16]
        assert all(x['state_bytes'] > 0 and x['first']['ms'] > 0 for x in row['generation'])
    for name in ('GLA', 'DeltaNet', 'Mamba2'):
        assert rows[name]['status'] == 'not run' and 'GPU' in rows[name]['reason']

    def growth(name):
        states = [x['state_bytes'] for x in ran[name]['generation']]
        return states[1] - states[0]

    assert growth('Longhorn') == growth("transformers' Mamba") == 0
    assert growth('Transformer') > 0
    assert plot.read_bytes().startswith(b'\x89PNG')


def test_not_run_and_compare(tmp_path, capsys, monkeypatch):
    def broken(size):
        raise ImportError('needs something else')

    monkeypatch.setattr(model, 'MODELS', (model.MODELS[0], model.Row('broken', broken)))
    path = tmp_path / 'model.json'
    model.main([*TINY, '--json', str(path)])
    assert json.loads(path.read_text())['rows'][1] == {
        'model': 'broken', 'status': 'not run', 'reason': 'ImportError: needs something else',
    }
    capsys.readouterr()
    model.main([*TINY, '--compare', str(path)])
    out = capsys.readouterr().out
    assert 'broken' in out and 'needs something else' in out
    assert 'Longhorn, training step:' in out and '3 times in both' in out
