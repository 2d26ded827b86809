"""Multi-query associative recall (Arora et al., 2023, arXiv 2312.04927; section 5.1 of the Longhorn paper).

A sequence is T/2 slots of two tokens, (key, value) or blank (0, 0). Its n pairs fill the first n slots. Each key then occurs
once more, as a query, in one of the remaining slots, slot g of them with probability proportional to (g+1)^(a-1):

    slot      0      1      2      3      4      5      6      7           n = 2 pairs, T = 16
    tokens   k1 v1  k2 v2   0  0  k2 v2   0  0  k1 v1   0  0   0  0
    labels                          v2            v1                         -100 everywhere else

zoology (the authors' code) keeps the token after a query blank and puts the label at the query itself. Here the answer follows
the query in the sequence, as for any causal language model, so that `generate` can continue a prompt that ends in a key. Each
key is asked once, so an answer only tells which values are left: guessing among those is right for a share of (1 + 1/2 + ... +
1/n) / n. zoology can also fill the blanks with random tokens; here they stay blank.

Token 0 is the blank, keys are 1 .. vocab_size/2 - 1, values vocab_size/2 .. vocab_size - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

BLANK = 0
IGNORE = -100
# one sequence in this many, selected by its hash, is held out from training
HELD_OUT_SHARE = 8
# a draw gives about as many sequences as are missing; after this many short draws, give up
MAX_ROUNDS = 100


@dataclass(frozen=True)
class MQAR:
    """The task; a wrong option raises `ValueError`, which names it."""

    vocab_size: int = field(default=128, metadata={'help': 'Tokens: a blank, then keys (one half), then values (the other).'})
    seq_len: int = field(default=64, metadata={'help': 'Tokens in a sequence.'})
    num_pairs: int = field(default=16, metadata={'help': 'Most key-value pairs in a training sequence, drawn from 1 up.'})
    power_a: float = field(default=0.01, metadata={'help': 'Exponent a of the gaps, p(g) ~ (g+1)^(a-1); 1 is uniform.'})

    def __post_init__(self) -> None:
        if self.vocab_size < 4 or self.vocab_size % 2:
            raise ValueError(f'vocab_size must be even and at least 4, got {self.vocab_size}')
        if not 1 <= self.num_pairs <= self.num_keys:
            raise ValueError(
                f'num_pairs must be between 1 and {self.num_keys}, the keys of vocab_size={self.vocab_size}, '
                f'got {self.num_pairs}'
            )
        if self.seq_len % 2 or self.seq_len < 4 * self.num_pairs:
            raise ValueError(
                f'seq_len must be even and at least 4 * num_pairs = {4 * self.num_pairs}, to hold each pair and its query, '
                f'got {self.seq_len}'
            )
        if not 0 < self.power_a <= 1:
            raise ValueError(f'power_a must be in (0, 1], got {self.power_a}')

    @property
    def num_keys(self) -> int:
        return self.vocab_size // 2 - 1

    def with_pairs(self, num_pairs: int) -> MQAR:
        """The same task for up to `num_pairs` pairs, in longer sequences if necessary."""
        return replace(self, num_pairs=num_pairs, seq_len=max(self.seq_len, 4 * num_pairs))


def draw(task: MQAR, num_pairs: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw N sequences; return tokens and labels, int64 `[N, T]` each.

    Args:
        task (MQAR): The task.
        num_pairs (np.ndarray): The number of pairs of each sequence, 1 to `task.num_pairs`, of shape `[N]`.
        rng (np.random.Generator): The random generator.
    """
    N, P, S = len(num_pairs), task.num_pairs, task.seq_len // 2
    half = task.vocab_size // 2
    n = num_pairs[:, None]
    pair, slot = np.arange(P), np.arange(S)
    keys = 1 + rng.random((N, half - 1)).argsort(axis=1)[:, :P]
    values = half + rng.random((N, half)).argsort(axis=1)[:, :P]

    # the n largest of log p + Gumbel noise are n draws from p without replacement
    gap = np.maximum(slot - n, 0)
    log_p = np.where(slot < n, -np.inf, (task.power_a - 1) * np.log(gap + 1))
    query_slots = (-log_p - rng.gumbel(size=(N, S))).argsort(axis=1)[:, :P]

    # the pair of each slot, -1 for none: queries first, because absent pairs point anywhere
    held = np.full((N, S), -1)
    np.put_along_axis(held, query_slots, np.where(pair < n, pair, -1), axis=1)
    held = np.where(slot < n, slot, held)
    slots = np.stack([np.take_along_axis(x, np.maximum(held, 0), axis=1) for x in (keys, values)], axis=-1)  # [N, S, 2]
    slots[held < 0] = BLANK
    labels = np.full_like(slots, IGNORE)
    asked = (held >= 0) & (slot >= n)
    labels[asked, 1] = slots[asked, 1]
    return slots.reshape(N, -1), labels.reshape(N, -1)


def is_held_out(tokens: np.ndarray) -> np.ndarray:
    """Whether each sequence `[N, T]` is held out, decided by its tokens alone, so that training never sees a test sequence."""
    weights = np.random.default_rng(0).integers(2**64, size=tokens.shape[1], dtype=np.uint64) | np.uint64(1)
    return tokens.astype(np.uint64) @ weights < np.uint64(2**64 // HELD_OUT_SHARE)


def examples(task: MQAR, size: int, seed: tuple[int, ...], held_out: bool, num_pairs: int | None = None):
    """Draw `size` sequences of the training or the held-out part: tokens and labels, int64 `[size, T]` each.

    Args:
        task (MQAR): The task.
        size (int): The number of sequences.
        seed (tuple of int): The same seed gives the same sequences.
        held_out (bool): Which part.
        num_pairs (int, Optional): Pairs in each sequence. Default: `None`, drawn for each from 1 to `task.num_pairs`.
    """
    rng = np.random.default_rng((*seed, held_out))
    parts, missing = [], size
    for _ in range(MAX_ROUNDS):
        N = missing * (HELD_OUT_SHARE if held_out else 1) + 8
        n = rng.integers(1, task.num_pairs + 1, N) if num_pairs is None else np.full(N, num_pairs)
        tokens, labels = draw(task, n, rng)
        wanted = is_held_out(tokens) == held_out
        parts.append((tokens[wanted][:missing], labels[wanted][:missing]))
        missing -= len(parts[-1][0])
        if missing == 0:
            return tuple(np.concatenate(x) for x in zip(*parts, strict=True))
    raise ValueError(
        f'vocab_size={task.vocab_size}, seq_len={task.seq_len} and num_pairs={num_pairs or task.num_pairs} allow too few '
        f'different sequences to hold some of them out'
    )


class TrainingStream(IterableDataset):
    """An endless stream of training sequences, drawn `block` at a time; the same seed gives the same stream."""

    def __init__(self, task: MQAR, seed: int, block: int = 256):
        self.task, self.seed, self.block = task, seed, block

    def __iter__(self):
        for i in count():
            yield from rows(*examples(self.task, self.block, (self.seed, i), held_out=False))


class HeldOut(Dataset):
    """A fixed set of `size` held-out sequences, with `num_pairs` pairs or, by default, a mixture."""

    def __init__(self, task: MQAR, size: int, seed: tuple[int, ...], num_pairs: int | None = None):
        self.rows = rows(*examples(task, size, seed, held_out=True, num_pairs=num_pairs))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.rows[i]


def rows(tokens: np.ndarray, labels: np.ndarray) -> list[dict[str, torch.Tensor]]:
    """One dict of `input_ids` and `labels`, `[T]` each, per sequence."""
    pairs = zip(torch.from_numpy(tokens), torch.from_numpy(labels), strict=True)
    return [{'input_ids': x, 'labels': y} for x, y in pairs]
