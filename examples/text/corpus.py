"""Text sources: files or a `datasets` name, the held-out part, and tokenisation."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import numpy as np
from datasets import Dataset, IterableDataset, load_dataset
from transformers import AutoTokenizer


@dataclass(frozen=True)
class TextArguments:
    """The source of the text; a wrong option raises `ValueError`, which names it."""

    files: list[str] = field(default_factory=list, metadata={
        'help': 'Files or patterns; `stdlib` is the Python library, `descriptions` are those of all installed packages.',
    })
    dataset: str | None = field(default=None, metadata={'help': 'Name of a dataset for `datasets.load_dataset`.'})
    dataset_config: str | None = field(default=None, metadata={'help': 'Its configuration.'})
    column: str = field(default='text', metadata={'help': 'The column with the text.'})
    streaming: bool = field(default=False, metadata={'help': 'Read the dataset document by document, without a copy of it.'})
    split: str = field(default='train', metadata={'help': 'The split to train on.'})
    held_out_split: str | None = field(default=None, metadata={'help': 'The split that is held out; else a share of `split`.'})
    held_out_share: float = field(default=0.05, metadata={'help': 'Share of the documents that is held out.'})
    split_seed: int | None = field(default=None, metadata={
        'help': 'Seed of `train_test_split`, which draws the held-out documents; without one it is every n-th document, '
        'or every n-th piece of fewer documents.',
    })
    tokenizer: str = field(default='bytes', metadata={'help': 'A tokenizer of transformers, or `bytes`.'})
    max_tokens: int | None = field(default=None, metadata={'help': 'Most tokens to train on; all of the text without it.'})
    max_held_out_tokens: int | None = field(default=None, metadata={'help': 'Most tokens to hold out.'})

    def __post_init__(self) -> None:
        if bool(self.files) == bool(self.dataset):
            raise ValueError(f'files or dataset must be given, and not both: got {self.files} and {self.dataset}')
        if not 0 < self.held_out_share < 1:
            raise ValueError(f'held_out_share must be between 0 and 1, got {self.held_out_share}')
        if self.streaming and not (self.dataset and self.held_out_split):
            raise ValueError('streaming needs a dataset and its held_out_split: a stream has no number of documents to share')
        for name in ('max_tokens', 'max_held_out_tokens'):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name} must be at least 1, got {value}')


def paths(arguments: TextArguments) -> list[Path]:
    """The files that match the patterns."""
    some: list[str] = []
    folders = sysconfig.get_paths()
    installed = {'stdlib': f'{folders["stdlib"]}/*.py', 'descriptions': f'{folders["purelib"]}/*.dist-info/METADATA'}
    for pattern in arguments.files:
        found = sorted(glob(installed.get(pattern, pattern)))
        if not found:
            raise ValueError(f'files holds {pattern!r}, which matches nothing')
        some += found
    return [Path(path) for path in some]


def documents(arguments: TextArguments, held_out: bool) -> Dataset | IterableDataset:
    """The documents to train on, or those held out, in one column `text`."""
    if arguments.dataset:
        split = arguments.held_out_split if held_out and arguments.held_out_split else arguments.split
        data = load_dataset(arguments.dataset, arguments.dataset_config, split=split, streaming=arguments.streaming)
        data = data.select_columns(arguments.column)
        data = data if arguments.column == 'text' else data.rename_column(arguments.column, 'text')
    else:
        data = Dataset.from_dict({'text': [path.read_text(errors='replace') for path in paths(arguments)]})
    if arguments.held_out_split:
        return data
    if arguments.split_seed is not None:
        parts = data.train_test_split(test_size=arguments.held_out_share, seed=arguments.split_seed)
        return parts['test' if held_out else 'train']
    n = round(1 / arguments.held_out_share)
    if len(data) < n:
        # as a single file: every n-th piece of it
        data = Dataset.from_dict({'text': [piece for text in data['text'] for piece in pieces(text, n)]})
    return data.select([i for i in range(len(data)) if (i % n == n - 1) == held_out])


def pieces(text: str, n: int) -> list[str]:
    """The text in n pieces of equal length, but for the last."""
    size = -(-len(text) // n)
    return [text[i * size:(i + 1) * size] for i in range(n)]


def vocabulary_size(arguments: TextArguments) -> int:
    return 256 if arguments.tokenizer == 'bytes' else len(AutoTokenizer.from_pretrained(arguments.tokenizer))


def encoder(arguments: TextArguments) -> Callable[[list[str]], list[np.ndarray]]:
    """Texts to tokens, each with an end-of-text token: the byte 0, or the tokenizer's."""
    if arguments.tokenizer == 'bytes':
        return lambda texts: [np.frombuffer(text.encode() + b'\0', dtype=np.uint8) for text in texts]
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    end = tokenizer.eos_token_id

    def encode(texts: list[str]) -> list[np.ndarray]:
        tokens = tokenizer(texts, verbose=False)['input_ids']
        return [np.asarray(ids if end is None or ids[-1:] == [end] else [*ids, end]) for ids in tokens]

    return encode
