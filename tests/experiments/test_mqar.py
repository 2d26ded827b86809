"""The recall experiment: a tiny grid trains, goes on where it stopped, picks the best learning rate and is drawn."""

import json

import pytest

from examples.mqar.data import HeldOut as mqar_held_out
from experiments import mqar

SETTING = {
    'title': 'tiny',
    'options': {
        'vocab_size': 16, 'hidden_size': 16, 'num_hidden_layers': 1, 'state_size': 4, 'steps': 4, 'batch_size': 8,
        'eval_steps': 2, 'eval_size': 16, 'test_size': 16, 'stop_patience': 0, 'device': 'cpu',
    },
    'grid': {
        'length': [{'seq_len': 16, 'num_pairs': 2}, {'seq_len': 24, 'num_pairs': 4}],
        'learning_rate': [1e-3, 1e-2],
        'mixer': ['diagonal', 'exact, scalar beta'],
    },
    'columns': ['mixer', 'seq_len', 'learning_rate'],
    'plot': {'x': 'step', 'panels': 'seq_len'},
}


def test_grid():
    cells = mqar.grid_cells(SETTING)
    assert len(cells) == 8
    assert {(cell['seq_len'], cell['num_pairs']) for cell in cells} == {(16, 2), (24, 4)}
    task = mqar.MQAR(vocab_size=16, seq_len=16, num_pairs=2)
    config = mqar.model_config(cells[1], task)
    assert (config.exact, config.scalar_beta, config.state_size) == (True, True, 4)
    normalised = mqar.model_config(cells[0] | {'mixer': 'diagonal, normalised keys'}, task)
    assert (normalised.exact, normalised.k_norm) == (False, 'l2')
    for mixer, option in (('tied q and k', 'tie_qk'), ('value projection', 'value_proj')):
        for update in ('diagonal', 'exact'):
            config = mqar.model_config(cells[0] | {'mixer': f'{update}, {mixer}'}, task)
            assert getattr(config, option) and config.exact == (update == 'exact')
    attention = mqar.model_config(cells[0] | {'mixer': 'attention'}, task)
    assert attention.attn['layers'] == [0]
    assert (attention.hidden_size, attention.tie_word_embeddings) == (16, False)


@pytest.mark.slow
def test_unfinished_grid_goes_on(tmp_path, monkeypatch):
    path = tmp_path / 'tiny.json'
    path.write_text(json.dumps(SETTING))
    run_cell, left = mqar.run_cell, [5]

    def interrupted(*args):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return run_cell(*args)

    monkeypatch.setattr(mqar, 'run_cell', interrupted)
    arguments = [str(path), '--output_dir', str(tmp_path / 'out')]
    with pytest.raises(KeyboardInterrupt):
        mqar.main(arguments)
    first = json.loads((tmp_path / 'out' / 'results.json').read_text())['runs']
    assert len(first) == 5
    left[0] = 3
    mqar.main(arguments)
    report = json.loads((tmp_path / 'out' / 'results.json').read_text())
    assert report['runs'][:5] == first
    assert len(report['runs']) == 8
    assert report['machine']['versions']['torch']
    assert (tmp_path / 'out' / 'results.png').read_bytes().startswith(b'\x89PNG')
    assert all([step for step, _ in run['history']] == [2, 4] and 0 <= run['recall'] <= 1 for run in report['runs'])


def test_the_rule():
    """One rate for all seeds, chosen by the mean on validation sequences; what is told is its recall on test sequences."""
    runs = [
        {'cell': {'mixer': mixer, 'seed': seed, 'learning_rate': rate}, 'history': [(1, 0.0), (2, validation)], 'recall': test}
        for mixer, seed, rate, validation, test in [
            # the best seed of the better rate on test sequences, and of each seed, is not what counts
            ('a', 0, 1e-3, 0.6, 0.4), ('a', 0, 1e-2, 0.3, 0.9), ('a', 1, 1e-3, 0.5, 0.2), ('a', 1, 1e-2, 0.7, 0.6),
            ('b', 0, 1e-3, 0.2, 0.2),
            # one seed of three does not make a mean
            ('c', 0, 1e-3, 0.5, 0.5), ('c', 1, 1e-3, 0.3, 0.3), ('c', 0, 1e-2, 0.9, 0.9),
        ]
    ]
    assert [{run['cell']['learning_rate'] for run in mqar.best_runs(runs) if run['cell']['mixer'] == x} for x in 'abc'] == [
        {1e-3}, {1e-3}, {1e-3}]
    told = mqar.summarize(runs, ['mixer'])
    assert [(x['mixer'], round(x['mean'], 9), x['lowest'], x['highest'], x['seeds']) for x in told] == [
        ('a', 0.3, 0.2, 0.4, 2), ('b', 0.2, 0.2, 0.2, 1), ('c', 0.4, 0.3, 0.5, 2)]


def test_sequences_that_choose_are_not_those_that_count(monkeypatch, tmp_path):
    """Training, validation and test sequences differ, and the result is the recall on the last."""
    drawn = []
    monkeypatch.setattr(mqar, 'HeldOut', lambda task, size, seed: drawn.append(seed) or mqar_held_out(task, size, seed))
    cell = mqar.grid_cells(SETTING)[0] | {'seed': 5, 'test_size': 32}
    run = mqar.run_cell(cell, tmp_path)
    assert drawn == [(5, 1)]
    task = mqar.MQAR(vocab_size=16, seq_len=16, num_pairs=2)
    test, validation = (mqar_held_out(task, size, seed) for size, seed in ((32, (5, 1)), (16, (5, 0))))
    assert 0 <= run['recall'] <= 1
    assert [x['input_ids'].tolist() for x in test][:16] != [x['input_ids'].tolist() for x in validation]
