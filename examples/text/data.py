"""The texts, files that are installed with Python and its packages, as bytes, and how well they are predicted.

Byte b is token b; one more token ends a text.
"""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from examples.text.corpus import TextArguments, paths

END = 256
# bytes kept of each held-out file, so that no long one decides the loss
HELD_OUT_BYTES = 16_384
# bytes of the held-out text that are read at a time
EVAL_BLOCK = 1024
# the training text has no line of so many bytes or more that a held-out file has
LONG_LINE = 40


def byte_tokenizer() -> PreTrainedTokenizerFast:
    characters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE({characters[b]: b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = AddedToken('<|end|>', special=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


@dataclass(frozen=True)
class Texts:
    train: list[bytes]
    held_out: list[bytes]
    train_files: list[str]
    held_out_files: list[str]
    removed_bytes: int


def read_texts(files: list[str], held_out_every: int) -> Texts:
    """Read the files that match and hold out one in `held_out_every`; of fewer files, that share at the end of each."""
    found = list(dict.fromkeys(paths(TextArguments(files=files))))
    if len(found) < held_out_every:
        texts = [path.read_text(encoding='utf-8', errors='replace').encode() for path in found]
        cuts = [len(text) - len(text) // held_out_every for text in texts]
        names = ['/'.join(path.parts[-2:]) for path in found]
        pairs = [*zip(texts, cuts, strict=True)]
        return Texts(
            [text[:cut] for text, cut in pairs], [text[cut:cut + HELD_OUT_BYTES] for text, cut in pairs], names,
            [f'the end of {name}' for name in names], 0,
        )
    held = found[held_out_every - 1::held_out_every]
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
        raise ValueError(f'files must have at least {block_size} bytes to train on and to hold out, got {len(tokens)}')
    return torch.from_numpy(tokens[:len(tokens) // block_size * block_size].reshape(-1, block_size).astype(np.int64))


def baselines(train: torch.Tensor, held_out: torch.Tensor, texts: list[bytes]) -> dict[str, float]:
    """Bits per held-out byte: by frequencies in the training text, with every count plus one; by gzip of the held-out text."""
    def index(rows):
        return ((END + 1) * rows[:, :-1] + rows[:, 1:]).flatten()

    pairs = 1. + torch.bincount(index(train), minlength=(END + 1)**2).view(END + 1, END + 1)
    single, following = pairs.sum(0) / pairs.sum(), pairs / pairs.sum(1, keepdim=True)
    return {
        'by the frequency of each byte': -single.log2()[held_out[:, 1:]].mean().item(),
        'by the frequency of each pair': -following.log2().flatten()[index(held_out)].mean().item(),
        'by gzip -9': 8 * len(gzip.compress(b''.join(texts), 9)) / sum(map(len, texts)),
    }


def count_files(files: list[str]) -> str:
    return f'{len(files):,} file{"s" * (len(files) != 1)}'


@torch.inference_mode()
def bits_per_byte(model, rows: torch.Tensor) -> float:
    """Mean loss in bits, over all tokens of each row but its first."""
    losses = [len(x) * model(x, labels=x).loss.item() for x in rows.to(model.device).split(4)]
    return sum(losses) / len(rows) / math.log(2)
