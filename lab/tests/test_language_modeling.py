"""Language modelling: a tiny run, and its extrapolation."""

import json
import math

import pytest

from lab.experiments import extrapolation, language_modeling
from lab.tests.test_tokens import write_texts


def test_train_and_extrapolate(tmp_path):
    write_texts(tmp_path)
    setting = {
        'title': 'tiny', 'text': {'files': [str(tmp_path / 'text' / '*.txt')]}, 'block_size': 32, 'eval_blocks': 3,
        'sequences_per_step': 8,
        'model': {'hidden_size': 16, 'num_hidden_layers': 1, 'bos_token_id': None, 'eos_token_id': None},
        'models': {
            'a model': {'model_type': 'longhorn'}, 'GLA': {'model_type': 'gla', 'num_heads': 1},
            'a rate of its own': {'model_type': 'longhorn', 'learning_rate': 1e-3},
        },
        'seeds': [0, 1], 'search': {'learning_rates': [1e-9, 1e-2], 'max_steps': 3}, 'against_time': True,
        'training': {
            'max_steps': 4, 'eval_steps': 2, 'per_device_train_batch_size': 4, 'learning_rate': 1e-9, 'use_cpu': True,
            'dataloader_pin_memory': False, 'disable_tqdm': True,
        },
    }
    path, output = tmp_path / 'setting.json', tmp_path / 'out'
    path.write_text(json.dumps(setting))
    options = ['--tokens_dir', str(tmp_path / 'tokens')]
    language_modeling.main([str(path), '--output_dir', str(output), *options])
    report = json.loads((output / 'results.json').read_text())
    runs, searched = report['runs'], report['search']
    assert all(run['history'][-1][0] == 3 for run in searched)
    selected = {}
    for name in ('a model', 'GLA'):
        losses = {run['learning_rate']: run['loss'] for run in searched if run['model'] == name}
        assert list(losses)[:4] == [1e-9, 1e-2, 2e-2, 4e-2]
        selected[name] = min(losses, key=losses.get)
        assert min(losses) < selected[name] < max(losses)
    assert [run['learning_rate'] for run in runs] == 2 * [*selected.values(), 1e-3]
    names = ['a model', 'GLA', 'a rate of its own']
    assert [(run['model'], run['seed']) for run in runs] == [(name, seed) for seed in (0, 1) for name in names]
    assert runs[0]['loss'] != runs[3]['loss']
    assert all([step for step, _ in run['history']] == [2, 4] for run in runs)
    assert all(run['perplexity'] == pytest.approx(math.exp(run['loss'])) and run['loss'] < math.log(256) for run in runs)

    # a finished model is not trained again
    language_modeling.main([str(path), '--output_dir', str(output), *options])
    again = json.loads((output / 'results.json').read_text())
    assert (again['runs'], again['search']) == (runs, searched)

    extrapolation.main([str(output / 'results.json'), '--factor', '4', *options])
    report = json.loads((output / 'extrapolation.json').read_text())
    assert [[x['end'] for x in run['spans']] for run in report['runs']] == [[33, 65, 97, 128]] * 6


def test_the_search_goes_on_past_its_best_end():
    setting = {'models': {'a': {}, 'b': {'learning_rate': 1.}}, 'search': {'learning_rates': [2., 4.], 'max_steps': 1}}

    def rates(loss) -> list[float]:
        searched = []
        while rate := language_modeling.next_rate(setting, searched, 'a'):
            searched.append({'model': 'a', 'learning_rate': rate, 'loss': loss(rate)})
        assert language_modeling.own_rate(setting, searched, 'a') == {'learning_rate': min(searched, key=lambda run: (
            math.isnan(run['loss']), run['loss']))['learning_rate']}
        return [run['learning_rate'] for run in searched]

    assert rates(lambda rate: abs(rate - 0.4)) == [2, 4, 1, 0.5, 0.25]
    assert rates(lambda rate: abs(rate - 9)) == [2, 4, 8, 16]
    # a plateau, and training that diverges
    assert rates(lambda rate: 1.) == [2, 4, 1]
    assert rates(lambda rate: math.nan if rate < 3 else 1.) == [2, 4, 8]
    assert language_modeling.next_rate(setting, [], 'b') is None
    assert language_modeling.own_rate(setting, [], 'b') == {'learning_rate': 1.}
