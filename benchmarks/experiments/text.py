"""Text as blocks of tokens: files or a `datasets` name, by a tokenizer or byte by byte."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import numpy as np
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer

# one document in so many, by its number, is held out
HELD_OUT_SHARE = 20


@dataclass(frozen=True)
class TextArguments:
    """Where the text comes from; a wrong option raises a `ValueError` that names it."""

    files: list[str] = field(default_factory=list, metadata={'help': 'Files or patterns; `stdlib` is the Python library.'})
    dataset: str | None = field(default=None, metadata={'help': 'Name of a dataset for `datasets.load_dataset`.'})
    dataset_config: str | None = field(default=None, metadata={'help': 'Its configuration.'})
    column: str = field(default='text', metadata={'help': 'The column with the text.'})
    tokenizer: str = field(default='bytes', metadata={'help': 'A tokenizer of transformers, or `bytes`.'})

    def __post_init__(self) -> None:
        if bool(self.files) == bool(self.dataset):
            raise ValueError(f'files or dataset must be given, and not both: got {self.files} and {self.dataset}')


def documents(arguments: TextArguments) -> Dataset:
    """A dataset of texts in one column `text`."""
    if arguments.dataset:
        data = load_dataset(arguments.dataset, arguments.dataset_config, split='train').select_columns(arguments.column)
        return data if arguments.column == 'text' else data.rename_column(arguments.column, 'text')
    paths = []
    for pattern in arguments.files:
        found = sorted(glob(str(Path(sysconfig.get_paths()['stdlib']) / '*.py') if pattern == 'stdlib' else pattern))
        if not found:
            raise ValueError(f'files holds {pattern!r}, which matches nothing')
        paths += found
    return Dataset.from_dict({'text': [Path(path).read_text(errors='replace') for path in paths]})


def vocabulary_size(arguments: TextArguments) -> int:
    return 256 if arguments.tokenizer == 'bytes' else len(AutoTokenizer.from_pretrained(arguments.tokenizer))


def token_blocks(arguments: TextArguments, block_size: int, held_out: bool) -> Dataset:
    """`input_ids` and `labels` of `block_size` tokens each, from the training or the held-out documents, end to end."""
    encode = None
    if arguments.tokenizer != 'bytes':
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        encode, end = tokenizer, [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    data = documents(arguments)
    rows = [i for i in range(len(data)) if (i % HELD_OUT_SHARE == HELD_OUT_SHARE - 1) == held_out]

    def tokenize(batch):
        if encode is None:
            return {'tokens': [list(text.encode()) + [0] for text in batch['text']]}
        return {'tokens': [ids + end for ids in encode(batch['text'], verbose=False)['input_ids']]}

    def group(batch):
        tokens = np.concatenate([np.asarray(x, dtype=np.int32) for x in batch['tokens']])
        count = len(tokens) // block_size
        blocks = tokens[:count * block_size].reshape(count, block_size).tolist()
        return {'input_ids': blocks, 'labels': blocks}

    data = data.select(rows).map(tokenize, batched=True, remove_columns='text')
    blocks = data.map(group, batched=True, batch_size=1000, remove_columns='tokens')
    if len(blocks) == 0:
        raise ValueError(f'block_size={block_size} is more than the {"held-out" if held_out else "training"} text holds')
    return blocks.with_format('torch')
