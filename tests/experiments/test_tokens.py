"""Text as files of tokens: what they hold, that they go on after an interruption, and what is refused."""

import json
import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from experiments import text as text_module
from experiments import tokens
from experiments.text import TextArguments, documents, vocabulary_size
from experiments.tokens import TokenBlocks, token_blocks, token_file

TEXTS = [f'document {i}: ' + 'abcdefgh ' * 60 for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'text').mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / 'text' / f'{i:02}.txt').write_text(text)
    return tmp_path


def arguments(folder, **options) -> TextArguments:
    return TextArguments(files=[str(folder / 'text' / '*.txt')], **options)


def read(path) -> bytes:
    return np.fromfile(path, dtype=np.uint16).astype(np.uint8).tobytes()


def test_blocks(folder):
    text = arguments(folder)
    assert vocabulary_size(text) == 256
    train, held_out = (token_blocks(text, 64, part, folder / 'tokens') for part in (False, True))
    held = [i for i in range(40) if i % 20 == 19]
    whole = ''.join(t + '\0' for i, t in enumerate(TEXTS) if i not in held).encode()
    assert b''.join(bytes(x['input_ids'].tolist()) for x in train) == whole[:len(whole) // 64 * 64]
    assert b''.join(bytes(x['input_ids'].tolist()) for x in held_out).startswith(b'document 19: ')
    assert all(torch.equal(x['input_ids'], x['labels']) and x['labels'].shape == (64,) for x in train)
    assert train[0]['labels'].dtype == torch.int64
    assert (folder / 'tokens' / tokens.identity(text) / 'training.bin').stat().st_size == 2 * len(whole)


def test_in_a_loader(folder):
    """Through worker processes, in which the file is opened anew; the pickled blocks hold none of it."""
    blocks = token_blocks(arguments(folder), 64, False, folder / 'tokens')
    wanted = torch.stack([x['input_ids'] for x in blocks])
    assert len(pickle.dumps(blocks)) < 2000
    got = torch.cat([x['input_ids'] for x in DataLoader(blocks, batch_size=7, num_workers=2)])
    assert torch.equal(got, wanted)


@pytest.mark.parametrize('at', [0, 1, 3])
def test_goes_on(folder, monkeypatch, at):
    """Interrupted after some batches, with a batch half written: the same file in the end, and no document read twice."""
    text = arguments(folder, held_out_share=0.5)
    wanted = read(token_file(text, False, folder / 'wanted'))
    monkeypatch.setattr(tokens, 'DOCUMENTS_A_BATCH', 4)
    made, write = [], tokens.write_progress

    def interrupted(path, progress):
        if len(made) == at:
            raise KeyboardInterrupt
        made.append(progress['documents'])
        write(path, progress)

    monkeypatch.setattr(tokens, 'write_progress', interrupted)
    with pytest.raises(KeyboardInterrupt):
        token_file(text, False, folder / 'tokens')
    monkeypatch.setattr(tokens, 'write_progress', write)
    encoded = []
    monkeypatch.setattr(tokens, 'encoder', lambda _: lambda texts: encoded.extend(texts) or text_module.encoder(text)(texts))
    path = token_file(text, False, folder / 'tokens')
    assert read(path) == wanted
    assert len(encoded) == 20 - 4 * at


def test_most_tokens(folder):
    path = token_file(arguments(folder, max_tokens=1000), False, folder / 'tokens')
    assert read(path) == ''.join(t + '\0' for t in TEXTS).encode()[:1000]


def test_changed_files(folder):
    """A damaged file of tokens is refused; changed text gets another."""
    text = arguments(folder)
    path = token_file(text, True, folder / 'tokens')
    with open(path, 'r+b') as file:
        file.write(b'x')
    with pytest.raises(ValueError, match='is not what was written: its SHA-256 is'):
        token_file(text, True, folder / 'tokens')
    (folder / 'text' / '19.txt').write_text('another')
    assert read(token_file(text, True, folder / 'tokens')).startswith(b'another\0')


def test_split_seed(folder, monkeypatch):
    """The authors' split: `train_test_split` with their seed, as nanoGPT has it."""
    data = Dataset.from_dict({'text': TEXTS})
    monkeypatch.setattr(text_module, 'load_dataset', lambda *args, **kwargs: data)
    text = TextArguments(dataset='a/name', held_out_share=0.1, split_seed=2357)
    wanted = data.train_test_split(test_size=0.1, seed=2357, shuffle=True)
    for held_out, part in ((False, 'train'), (True, 'test')):
        assert documents(text, held_out)['text'][:] == wanted[part]['text'][:]


def test_stream(folder):
    """A dataset that is read document by document, with a held-out split of its own."""
    for split, some in (('train', TEXTS[:30]), ('validation', TEXTS[30:])):
        (folder / f'{split}.jsonl').write_text(''.join(json.dumps({'content': text}) + '\n' for text in some))
    (folder / 'data').mkdir()
    for split in ('train', 'validation'):
        (folder / f'{split}.jsonl').rename(folder / 'data' / f'{split}.jsonl')
    text = TextArguments(
        dataset=str(folder / 'data'), column='content', streaming=True, held_out_split='validation', max_tokens=2000,
    )
    train, held_out = (read(token_file(text, part, folder / 'tokens')) for part in (False, True))
    assert train == ''.join(t + '\0' for t in TEXTS).encode()[:2000]
    assert held_out == ''.join(t + '\0' for t in TEXTS[30:]).encode()


@pytest.mark.parametrize(('options', 'message'), [
    ({}, 'files or dataset must be given'),
    ({'files': ['a'], 'dataset': 'b'}, 'files or dataset must be given, and not both'),
    ({'files': ['a'], 'held_out_share': 1}, 'held_out_share must be between 0 and 1, got 1'),
    ({'files': ['a'], 'streaming': True}, 'streaming needs a dataset and its held_out_split'),
    ({'files': ['a'], 'max_tokens': 0}, 'max_tokens must be at least 1, got 0'),
])
def test_bad_text(options, message):
    with pytest.raises(ValueError, match=message):
        TextArguments(**options)


def test_nothing_there(folder):
    with pytest.raises(ValueError, match='which matches nothing'):
        token_blocks(TextArguments(files=[str(folder / '*.none')]), 8, False, folder)
    with pytest.raises(ValueError, match='block_size=99999 is more than the held-out text holds'):
        token_blocks(arguments(folder), 99999, True, folder)
    with pytest.raises(IndexError, match='index must be at least 0'):
        TokenBlocks(token_file(arguments(folder), True, folder), 8)[-1]
