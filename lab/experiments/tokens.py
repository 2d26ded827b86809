"""Text as a file of tokens, 2 bytes each, written once and mapped into memory.

A folder has `training.bin`, `held_out.bin` and a JSON file of the progress of each: documents read, tokens written, and the
SHA-256 of the tokens once it is finished. Writing shows a progress bar and, after an interruption, continues from the last
whole batch of documents.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import torch
from datasets import IterableDataset
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from examples.text.corpus import TextArguments, documents, encoder, paths, vocabulary_size

# documents read, tokenised and written together
DOCUMENTS_A_BATCH = 1000


def token_blocks(arguments: TextArguments, block_size: int, held_out: bool, folder: Path) -> TokenBlocks:
    """Blocks of `block_size` tokens of the training or the held-out documents, end to end; below `folder` is their file."""
    path = token_file(arguments, held_out, folder)
    blocks = TokenBlocks(path, block_size)
    if len(blocks) == 0:
        raise ValueError(f'block_size={block_size} is more than the {"held-out" if held_out else "training"} text holds')
    return blocks


def token_file(arguments: TextArguments, held_out: bool, folder: Path) -> Path:
    """The finished file of this text's tokens, written if missing; its SHA-256 is checked once per process."""
    path = folder / identity(arguments) / ('held_out.bin' if held_out else 'training.bin')
    if not progress_of(path)['sha256']:
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / 'text.json').write_text(json.dumps(asdict(arguments), indent=1) + '\n')
        write_tokens(arguments, held_out, path)
    check_tokens(path, path.stat().st_mtime_ns)
    return path


def identity(arguments: TextArguments) -> str:
    """A name for the source of the tokens; another text, or changed files, get another folder."""
    files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths(arguments)]
    return hashlib.sha256(json.dumps([asdict(arguments), files]).encode()).hexdigest()[:16]


def progress_of(path: Path) -> dict:
    file = path.with_suffix('.json')
    if file.exists() and path.exists():
        return json.loads(file.read_text())
    return {'documents': 0, 'tokens': 0, 'dtype': None, 'sha256': None}


def write_progress(path: Path, progress: dict) -> None:
    """Write atomically, so that an interruption leaves the previous file."""
    file = path.with_suffix('.part')
    file.write_text(json.dumps(progress) + '\n')
    os.replace(file, path.with_suffix('.json'))


def write_tokens(arguments: TextArguments, held_out: bool, path: Path) -> None:
    progress = progress_of(path)
    most = arguments.max_held_out_tokens if held_out else arguments.max_tokens
    dtype = np.dtype(np.uint16 if vocabulary_size(arguments) <= 2**16 else np.uint32)
    encode, data = encoder(arguments), documents(arguments, held_out)
    total = None if isinstance(data, IterableDataset) else len(data)
    with (
        open(path, 'r+b' if path.exists() else 'w+b') as file,
        tqdm(total=total, initial=progress['documents'], desc=f'tokens, {path.stem}', unit=' documents') as bar,
    ):
        # what was written after the last progress report is written again
        file.truncate(progress['tokens'] * dtype.itemsize)
        file.seek(0, os.SEEK_END)
        for batch in data.skip(progress['documents']).iter(batch_size=DOCUMENTS_A_BATCH):
            tokens = np.concatenate(encode(batch['text']))
            if most is not None:
                tokens = tokens[:most - progress['tokens']]
            file.write(tokens.astype(dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())
            progress |= {
                'documents': progress['documents'] + len(batch['text']), 'tokens': progress['tokens'] + len(tokens),
                'dtype': dtype.name,
            }
            write_progress(path, progress)
            bar.update(len(batch['text']))
            if progress['tokens'] == most:
                break
        file.seek(0)
        write_progress(path, progress | {'dtype': dtype.name, 'sha256': hashlib.file_digest(file, 'sha256').hexdigest()})


@cache
def check_tokens(path: Path, modified: int) -> None:
    """Raise `ValueError` if the file is not as written; `modified` makes a changed file be checked again."""
    with open(path, 'rb') as file:
        found = hashlib.file_digest(file, 'sha256').hexdigest()
    if found != progress_of(path)['sha256']:
        raise ValueError(f'{path} is not what was written: its SHA-256 is {found}; remove its folder to make it again')


class TokenBlocks(Dataset):
    """`input_ids` and `labels`, int64 `[block_size]`, of each block of a file; a remainder at its end is not used."""

    def __init__(self, path: Path, block_size: int) -> None:
        self.path, self.block_size = path, block_size
        progress = progress_of(path)
        self.dtype, self.length = progress['dtype'], progress['tokens'] // block_size
        self.tokens: np.memmap | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f'index must be at least 0 and less than {self.length}, got {index}')
        if self.tokens is None:
            self.tokens = np.memmap(self.path, dtype=self.dtype, mode='r')
        block = self.tokens[index * self.block_size:(index + 1) * self.block_size]
        ids = torch.from_numpy(block.astype(np.int64))
        return {'input_ids': ids, 'labels': ids}

    def __getstate__(self) -> dict:
        # a worker of a loader opens the file itself; pickling the map would copy all of it
        return self.__dict__ | {'tokens': None}
