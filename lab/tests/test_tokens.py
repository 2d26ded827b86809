"""Text as files of tokens: what they hold, and that they go on after an interruption."""

import numpy as np
import pytest
import torch

from examples.text.corpus import TextArguments, vocabulary_size
from lab.experiments import tokens
from lab.experiments.tokens import token_blocks

TEXTS = [f'document {i}: ' + 'abcdefgh ' * 60 for i in range(40)]


def write_texts(folder):
    (folder / 'text').mkdir()
    for i, text in enumerate(TEXTS):
        (folder / 'text' / f'{i:02}.txt').write_text(text)


@pytest.fixture
def folder(tmp_path):
    write_texts(tmp_path)
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
