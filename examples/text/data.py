"""The texts, files that are installed with Python and its packages, and how well simple methods predict those held out."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from examples.text.config import RunArguments
from examples.text.tokenizer import END
from experiments.text import TextArguments, paths

# bytes; a line of this length or more that the held-out text has is removed from the training text
LONG_LINE = 40
# bytes of a held-out file that are predicted; so no long file decides the loss
HELD_OUT_BYTES = 16_384


@dataclass(frozen=True)
class Texts:
    train: list[bytes]
    held_out: list[bytes]
    train_files: list[str]
    held_out_files: list[str]
    removed_bytes: int


def read_texts(run: RunArguments) -> Texts:
    """Read the files and split them; the training text keeps no long line of the held-out text."""
    found = list(dict.fromkeys(paths(TextArguments(files=run.files))))
    if len(found) < run.held_out_every:
        raise ValueError(f'held_out_every must be at most {len(found)}, the files that match, got {run.held_out_every}')
    held = found[run.held_out_every - 1::run.held_out_every]
    rest = [path for path in found if path not in held]
    held_out, train = ([path.read_text(encoding='utf-8', errors='replace').encode() for path in x] for x in (held, rest))
    known = {line.strip() for text in held_out for line in text.splitlines() if len(line.strip()) >= LONG_LINE}
    kept = [b''.join(x for x in text.splitlines(keepends=True) if x.strip() not in known) for text in train]
    # the folder names the package
    names = (['/'.join(path.parts[-2:]) for path in x] for x in (rest, held))
    return Texts(kept, [text[:HELD_OUT_BYTES] for text in held_out], *names, sum(map(len, train)) - sum(map(len, kept)))


def to_rows(texts: list[bytes], block_size: int) -> torch.Tensor:
    """Tokens int64 `[blocks, block_size]` of the texts, one after the other; a remainder is left out."""
    tokens = np.concatenate([np.append(np.frombuffer(text, dtype=np.uint8), np.uint16(END)) for text in texts])
    if len(tokens) < block_size:
        raise ValueError(f'block_size must be at most {len(tokens)}, the tokens of a part of the text, got {block_size}')
    rows = tokens[:len(tokens) // block_size * block_size].reshape(-1, block_size)
    return torch.from_numpy(rows.astype(np.int64))


def baselines(train: torch.Tensor, held_out: torch.Tensor, texts: list[bytes]) -> dict[str, float]:
    """Bits per held-out byte: by counts of bytes and of pairs in the training text, plus one; by gzip of the held-out text."""
    def index(rows):
        return ((END + 1) * rows[:, :-1] + rows[:, 1:]).flatten()

    pairs = 1. + torch.bincount(index(train), minlength=(END + 1)**2).view(END + 1, END + 1)
    single = pairs.sum(0)
    return {
        'each byte by its frequency': -(single / single.sum()).log2()[held_out[:, 1:]].mean().item(),
        'each byte by the one before it': -(pairs / pairs.sum(1, keepdim=True)).log2().flatten()[index(held_out)].mean().item(),
        'gzip -9': 8 * len(gzip.compress(b''.join(texts), 9)) / sum(map(len, texts)),
    }


@torch.inference_mode()
def bits_per_byte(model, rows: torch.Tensor, batch_size: int) -> float:
    """Mean loss in bits, over all tokens of each row but its first."""
    losses = [len(x) * model(x, labels=x).loss.item() for x in rows.to(model.device).split(batch_size)]
    return sum(losses) / len(rows) / math.log(2)
