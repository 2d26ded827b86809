"""Language modelling and length extrapolation: a tiny run of both commands."""

import json
import math

import pytest
from transformers import TrainingArguments

from experiments import extrapolation, language_modeling


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'text').mkdir()
    for i in range(40):
        (tmp_path / 'text' / f'{i:02}.txt').write_text(f'document {i}: ' + 'abcdefgh ' * 60)
    return tmp_path


def test_train_and_extrapolate(folder):
    setting = {
        'title': 'tiny', 'text': {'files': [str(folder / 'text' / '*.txt')]}, 'block_size': 32, 'eval_blocks': 3,
        'sequences_per_step': 8,
        'model': {'hidden_size': 16, 'num_hidden_layers': 1, 'bos_token_id': None, 'eos_token_id': None},
        'models': {'a model': {'model_type': 'longhorn'}, 'exact': {'model_type': 'longhorn', 'exact': True}},
        'seeds': [0, 1],
        'training': {
            'max_steps': 4, 'eval_steps': 2, 'per_device_train_batch_size': 4, 'learning_rate': 1e-2, 'use_cpu': True,
            'dataloader_pin_memory': False, 'disable_tqdm': True,
        },
    }
    path, output = folder / 'setting.json', folder / 'out'
    path.write_text(json.dumps(setting))
    options = ['--tokens_dir', str(folder / 'tokens')]
    language_modeling.main([str(path), '--output_dir', str(output), *options])
    runs = json.loads((output / 'results.json').read_text())['runs']
    assert [(run['model'], run['seed']) for run in runs] == [('a model', 0), ('exact', 0), ('a model', 1), ('exact', 1)]
    assert runs[0]['loss'] != runs[2]['loss']
    assert all([step for step, _ in run['history']] == [2, 4] for run in runs)
    assert all(run['perplexity'] == pytest.approx(math.exp(run['loss'])) and run['loss'] < math.log(256) for run in runs)

    # a finished model is not trained again
    language_modeling.main([str(path), '--output_dir', str(output), *options])
    assert json.loads((output / 'results.json').read_text())['runs'] == runs

    extrapolation.main([str(output / 'results.json'), '--factor', '4', *options])
    report = json.loads((output / 'extrapolation.json').read_text())
    assert [[x['end'] for x in run['spans']] for run in report['runs']] == [[33, 65, 97, 128]] * 4
    for name in ('results', 'extrapolation'):
        assert (output / f'{name}.png').read_bytes().startswith(b'\x89PNG')


def test_sequences_per_step(folder):
    """Gradients are accumulated over as many batches as a step's sequences take; another number is refused."""
    arguments = TrainingArguments(output_dir=str(folder), per_device_train_batch_size=4, use_cpu=True)
    assert language_modeling.accumulated_batches(24, arguments) == 6
    with pytest.raises(ValueError, match='sequences_per_step=26 is not a multiple of the 4 sequences'):
        language_modeling.accumulated_batches(26, arguments)


def test_unknown_model(folder, capsys):
    (folder / 'setting.json').write_text(json.dumps({'models': {'a model': {}}}))
    with pytest.raises(SystemExit):
        language_modeling.main([str(folder / 'setting.json'), '--models', 'another'])
    assert "--models: ['another'] are not in" in capsys.readouterr().err
