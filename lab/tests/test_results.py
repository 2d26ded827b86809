"""The results in the repository are runs of the settings beside them: the same command would continue from them."""

import json

import pytest

from lab.experiments import language_modeling, mqar
from tests.forks import ROOT

RESULTS = ROOT / 'lab/experiments/results'
SETTINGS = RESULTS.parent / 'settings'
NAMES = [path.stem for path in sorted(RESULTS.glob('*.json')) if (SETTINGS / path.name).exists()]


def read(name: str) -> tuple[dict, dict]:
    setting, report = (json.loads((folder / f'{name}.json').read_text()) for folder in (SETTINGS, RESULTS))
    return setting, report


@pytest.mark.parametrize('name', [name for name in NAMES if 'grid' in read(name)[0]])
def test_runs_are_in_the_grid(name):
    setting, report = read(name)
    cells = mqar.grid_cells(setting)
    assert report['runs'] and all(run['cell'] in cells for run in report['runs'])


@pytest.mark.parametrize('name', [name for name in NAMES if 'models' in read(name)[0]])
def test_models_are_those_of_the_setting(name):
    setting, report = read(name)
    assert report['runs']
    for run in report['runs']:
        options = setting['model'] | setting['models'][run['model']]
        for own in ('learning_rate', 'slow_gate'):
            options.pop(own, None)
        assert run['options'] | options == run['options'] and run['seed'] in setting['seeds']
        assert run['history'][-1][0] == setting['training']['max_steps']


def test_rates_are_those_of_the_search():
    setting, report = read('lm_2M')
    for run in report['runs']:
        assert language_modeling.own_rate(setting, report['search'], run['model']) == {'learning_rate': run['learning_rate']}
    for name in setting['models']:
        rate = language_modeling.next_rate(setting, report['search'], name)
        assert rate is None, (name, rate)
