"""Language modelling and length extrapolation: a tiny run of both commands, and of the text behind them."""

import json
import math

import pytest
import torch

from benchmarks.experiments import extrapolation, language_modeling
from benchmarks.experiments.text import HELD_OUT_SHARE, TextArguments, token_blocks, vocabulary_size


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'text').mkdir()
    for i in range(2 * HELD_OUT_SHARE):
        (tmp_path / 'text' / f'{i:02}.txt').write_text(f'document {i}: ' + 'abcdefgh ' * 60)
    return tmp_path


def test_blocks(folder):
    text = TextArguments(files=[str(folder / 'text' / '*.txt')])
    assert vocabulary_size(text) == 256
    train, held_out = (token_blocks(text, 64, part) for part in (False, True))
    decoded = [bytes(x['input_ids'].tolist()).decode() for x in held_out]
    assert 'document 19: ' in decoded[0]
    assert not any('document 19: ' in bytes(x['input_ids'].tolist()).decode() for x in train)
    assert all(torch.equal(x['input_ids'], x['labels']) and len(x['labels']) == 64 for x in train)
    assert len(train) == sum(len(p.read_text()) + 1 for i, p in enumerate(sorted((folder / 'text').iterdir()))
                             if i % HELD_OUT_SHARE != HELD_OUT_SHARE - 1) // 64


@pytest.mark.parametrize(('options', 'message'), [
    ({}, 'files or dataset must be given'),
    ({'files': ['a'], 'dataset': 'b'}, 'files or dataset must be given, and not both'),
])
def test_bad_text(options, message):
    with pytest.raises(ValueError, match=message):
        TextArguments(**options)


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match='which matches nothing'):
        token_blocks(TextArguments(files=[str(tmp_path / '*.txt')]), 8, False)


def test_train_and_extrapolate(folder):
    setting = {
        'title': 'tiny', 'text': {'files': [str(folder / 'text' / '*.txt')]}, 'block_size': 32,
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
    language_modeling.main([str(path), '--output_dir', str(output)])
    runs = json.loads((output / 'results.json').read_text())['runs']
    assert [(run['model'], run['seed']) for run in runs] == [('a model', 0), ('exact', 0), ('a model', 1), ('exact', 1)]
    assert runs[0]['loss'] != runs[2]['loss']
    assert all([step for step, _ in run['history']] == [2, 4] for run in runs)
    assert all(run['perplexity'] == pytest.approx(math.exp(run['loss'])) and run['loss'] < math.log(256) for run in runs)

    # a finished model is not trained again
    language_modeling.main([str(path), '--output_dir', str(output)])
    assert json.loads((output / 'results.json').read_text())['runs'] == runs

    extrapolation.main([str(output / 'results.json'), '--factor', '4'])
    report = json.loads((output / 'extrapolation.json').read_text())
    assert [[x['end'] for x in run['spans']] for run in report['runs']] == [[33, 65, 97, 128]] * 4
    for name in ('results', 'extrapolation'):
        assert (output / f'{name}.png').read_bytes().startswith(b'\x89PNG')
