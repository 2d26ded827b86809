"""State tracking and MAD's tasks: what is drawn, where an answer is asked, and training by zoology's rules.

    python -m lab.experiments mqar lab/experiments/settings/state_tracking.json

State tracking: a sequence names elements of a group, and each token's target is the product so far. Parity is Z2 and addition
modulo 5 is Z5; S3 and S5 are the permutations of 3 and 5 things (arXiv 2404.08819, 2411.12537).

MAD (arXiv 2403.17844): recall of values in context, by keys of one token, of several (fuzzy) or among noise; copying tokens
from among blanks, in order; compression of a sequence into its last hidden state; a map from keys to values that is the same
in all sequences. Sizes are options of the setting, so they can be MAD's own or smaller.

Palindromes and stacks are Kimi Linear's (arXiv 2510.26692); a few pairs among much noise (`needles`) stand for S-NIAH of RULER
(arXiv 2404.06654).

A task draws tokens and targets `[N, T]`, the target beside the token that it is asked at, `IGNORE` where nothing is asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.random import Generator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed

from benchmarks.report.plots import label_ends, style, tidy
from examples.mqar.data import IGNORE
from lab.experiments import zoology

Drawn = tuple[np.ndarray, np.ndarray]


@cache
def cayley_table(group: str) -> np.ndarray:
    """`table[a, b]` is the element `b a` (a first), by number, of `Zn` or `Sn`; 0 is the identity."""
    n = int(group[1:])
    if group[0] == 'Z':
        return (np.arange(n)[:, None] + np.arange(n)) % n
    elements = np.array(list(permutations(range(n))))
    number = {tuple(x): i for i, x in enumerate(elements)}
    return np.array([[number[tuple(b[a])] for b in elements] for a in elements])


def products(rng: Generator, size: int, seq_len: int, group: str) -> Drawn:
    table = cayley_table(group)
    tokens = rng.integers(len(table), size=(size, seq_len))
    targets = tokens.copy()
    for t in range(1, seq_len):
        targets[:, t] = table[targets[:, t - 1], tokens[:, t]]
    return tokens, targets


def recall(rng: Generator, size: int, seq_len: int, vocab_size: int, noise: float = 0.0, noise_tokens: int = 0) -> Drawn:
    """Pairs of a key and its value in this sequence, among pairs of noise; asked for each key that was seen before."""
    keys = (vocab_size - noise_tokens) // 2
    values = rng.integers(keys, 2 * keys, size=(size, keys))
    shown = rng.integers(keys, size=(size, seq_len // 2))
    is_noise = rng.random(shown.shape) < noise
    tokens = np.stack([shown, np.take_along_axis(values, shown, 1)], -1)
    if noise_tokens:
        tokens[is_noise] = rng.integers(2 * keys, vocab_size, size=tokens[is_noise].shape)
    seen = np.zeros((size, keys), dtype=bool)
    targets, rows = np.full_like(tokens, IGNORE), np.arange(size)
    for i in range(seq_len // 2):
        key = shown[:, i]
        asked = seen[rows, key] & ~is_noise[:, i]
        targets[asked, i, 0] = tokens[asked, i, 1]
        seen[rows, key] |= ~is_noise[:, i]
    return tokens.reshape(size, -1), targets.reshape(size, -1)


def fuzzy_recall(rng: Generator, size: int, seq_len: int, vocab_size: int, longest: int = 3) -> Drawn:
    """The same where keys and values are one to `longest` tokens; what is left at the end is filled with the last token."""
    half = (vocab_size - 1) // 2
    tokens, targets = np.full((size, seq_len), vocab_size - 1), np.full((size, seq_len), IGNORE)
    for n in range(size):
        known: dict[tuple, np.ndarray] = {}
        at = 0
        while at + 2 * longest <= seq_len:
            key = tuple(rng.permutation(half)[:rng.integers(1, longest + 1)])
            if key not in known and known and rng.random() < 0.5:
                key = list(known)[rng.integers(len(known))]
            asked = key in known
            value = known.setdefault(key, half + rng.permutation(half)[:rng.integers(1, longest + 1)])
            start, stop = at + len(key), at + len(key) + len(value)
            tokens[n, at:stop] = [*key, *value]
            if asked:
                targets[n, start - 1:stop - 1] = value
            at = stop
    return tokens, targets


def selective_copying(rng: Generator, size: int, seq_len: int, vocab_size: int, count: int = 16) -> Drawn:
    """`count` tokens somewhere among blanks, then a mark, behind which they are asked in their order."""
    blank, mark, length = vocab_size - 2, vocab_size - 1, seq_len - count - 1
    tokens, targets = np.full((size, seq_len), blank), np.full((size, seq_len), IGNORE)
    copied = rng.integers(blank, size=(size, count))
    np.put_along_axis(tokens, np.sort(rng.random((size, length)).argsort(1)[:, :count], 1), copied, 1)
    tokens[:, length] = mark
    targets[:, length + 1:] = copied
    return tokens, targets


def memorisation(rng: Generator, size: int, seq_len: int, vocab_size: int) -> Drawn:
    """Keys, each before a token that asks for its value by a map that is fixed."""
    half = (vocab_size - 1) // 2
    values = half + np.random.default_rng(12345).permutation(half)
    keys = rng.integers(half, size=(size, seq_len // 2))
    tokens = np.stack([keys, np.full_like(keys, vocab_size - 1)], -1)
    targets = np.stack([np.full_like(keys, IGNORE), values[keys]], -1)
    return tokens.reshape(size, -1), targets.reshape(size, -1)


def compression(rng: Generator, size: int, seq_len: int, vocab_size: int) -> Drawn:
    """Random tokens and a last one, whose hidden state must hold them all (:class:`Compressor`)."""
    tokens = rng.integers(vocab_size - 1, size=(size, seq_len))
    tokens[:, -1] = vocab_size - 1
    return tokens, np.where(tokens == vocab_size - 1, IGNORE, tokens)


def palindrome(rng: Generator, size: int, seq_len: int, vocab_size: int) -> Drawn:
    """Random tokens, a mark, behind which they are asked from the last to the first."""
    half = seq_len // 2
    copied = rng.integers(vocab_size - 1, size=(size, half))
    tokens = np.concatenate([copied, np.full((size, 1), vocab_size - 1), copied[:, :0:-1]], 1)
    targets = np.full_like(tokens, IGNORE)
    targets[:, half:] = copied[:, ::-1]
    return tokens, targets


def stacks(rng: Generator, size: int, seq_len: int, vocab_size: int, count: int = 4) -> Drawn:
    """Values that are pushed on `count` stacks or popped from them, each behind a token that names both; asked when popped."""
    values, rows = vocab_size - 2 * count, np.arange(size)
    tokens, targets = np.empty((size, seq_len // 2, 2), dtype=int), np.full((size, seq_len // 2, 2), IGNORE)
    held, depth = np.zeros((size, count, seq_len // 2), dtype=int), np.zeros((size, count), dtype=int)
    for i in range(seq_len // 2):
        stack, value = rng.integers(count, size=size), rng.integers(values, size=size)
        pops = (depth[rows, stack] > 0) & (rng.random(size) < 0.5)
        depth[rows, stack] -= pops
        top = depth[rows, stack]
        value = np.where(pops, held[rows, stack, top], value)
        held[rows, stack, top] = value
        depth[rows, stack] += ~pops
        tokens[:, i] = np.stack([values + stack + count * pops, value], -1)
        targets[pops, i, 0] = value[pops]
    return tokens.reshape(size, -1), targets.reshape(size, -1)


def needles(rng: Generator, size: int, seq_len: int, vocab_size: int, count: int = 4, noise_tokens: int = 64) -> Drawn:
    """`count` pairs of a key and its value anywhere in noise; asked for each key at the end."""
    keys = (vocab_size - noise_tokens) // 2
    shown = rng.random((size, keys)).argsort(1)[:, :count]
    answers = rng.integers(keys, 2 * keys, size=shown.shape)
    tokens = rng.integers(2 * keys, vocab_size, size=(size, seq_len))
    places, rows = 2 * rng.random((size, (seq_len - count) // 2)).argsort(1)[:, :count], np.arange(size)[:, None]
    tokens[rows, places], tokens[rows, places + 1], tokens[:, -count:] = shown, answers, shown
    targets = np.full_like(tokens, IGNORE)
    targets[:, -count:] = answers
    return tokens, targets


TASKS: dict[str, Callable[..., Drawn]] = {
    'products': products, 'recall': recall, 'fuzzy recall': fuzzy_recall,
    'selective copying': selective_copying, 'memorisation': memorisation, 'compression': compression,
    'palindrome': palindrome, 'stacks': stacks, 'needles': needles,
}


class Sequences(Dataset):
    """`size` sequences, `input_ids` and `targets`, of a cell's task, as long as the cell says or `seq_len`."""

    def __init__(self, cell: dict, size: int, seed: int, seq_len: int | None = None) -> None:
        drawn = TASKS[cell['task']](
            np.random.default_rng(seed), size, cell['seq_len'] if seq_len is None else seq_len, **cell['task_options'],
        )
        self.tokens, self.targets = map(torch.from_numpy, drawn)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {'input_ids': self.tokens[i], 'targets': self.targets[i]}


class Compressor(nn.Module):
    """A model whose last hidden state is decoded by an MLP, for each position from a vector of its own."""

    def __init__(self, model: nn.Module, width: int, seq_len: int, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self.positions = nn.Embedding(seq_len, width)
        self.decoder = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.SiLU(), nn.Linear(4 * width, vocab_size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        last = self.model.base_model(input_ids=input_ids, use_cache=False)[0][:, -1:]
        places = self.positions.weight.expand(len(input_ids), -1, -1)
        return self.decoder(torch.cat([last.expand_as(places), places], -1))


def answers(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[Q, vocabulary]` where something is asked, and the targets `[Q]` there."""
    asked = batch['targets'] != IGNORE
    if isinstance(model, Compressor):
        return model(batch['input_ids'])[asked], batch['targets'][asked]
    hidden = model.base_model(input_ids=batch['input_ids'], use_cache=False)[0]
    return model.get_output_embeddings()(hidden[asked]), batch['targets'][asked]


class TaskTrainer(zoology.RecallTrainer):
    answers = staticmethod(answers)


@torch.no_grad()
def accuracy_by_token(model: nn.Module, data: Sequences, batch_size: int) -> list[float]:
    """At each token where something is asked, the share of sequences that are answered right there."""
    model.eval()
    right = []
    for batch in DataLoader(data, batch_size=batch_size):
        logits, targets = answers(model, batch)
        right.append((logits.argmax(-1) == targets).view(len(batch['targets']), -1))
    return torch.cat(right).float().mean(0).tolist()


def run_cell(cell: dict, folder: Path, build_model: Callable) -> dict:
    """Train a cell's model on its task; accuracy on other sequences, and on longer ones where `longest` is among the options.

    `by_length` holds the mean accuracy of the tokens that are asked behind the length before and up to this one, or with
    `lengths` among the options the accuracy on sequences of each length.
    """
    set_seed(cell['seed'])
    options = cell['task_options']
    vocab_size = options['vocab_size'] if 'vocab_size' in options else len(cayley_table(options['group']))
    model = build_model(cell, SimpleNamespace(vocab_size=vocab_size, seq_len=cell['seq_len']))
    parameters = model.num_parameters()
    if cell['task'] == 'compression':
        model = Compressor(model, cell['hidden_size'], cell['seq_len'], vocab_size)
    data, held_out, test = (Sequences(cell, size, 3 * cell['seed'] + i) for i, size in enumerate(
        (cell['train_size'], cell['test_size'], cell['test_size']),
    ))
    started = time.process_time()
    trainer = zoology.build_trainer(model, cell, data, held_out, folder, TaskTrainer)
    trainer.train()
    log = trainer.state.log_history
    result = {
        'cell': cell, 'parameters': parameters, 'history': [(x['step'], x['eval_recall']) for x in log if 'eval_recall' in x],
        'loss': [x['loss'] for x in log if 'loss' in x][-1],
        'recall': zoology.recall(model, test, cell['batch_size'], answers), 'seconds': time.process_time() - started,
    }
    if 'longest' in cell:
        T, longest = cell['seq_len'], cell['longest']
        long = Sequences(cell, cell['test_size'], 3 * cell['seed'] + 3, longest)
        by_token = accuracy_by_token(model, long, cell['batch_size'])
        ends = {n: n * len(by_token) // longest for n in (T << i for i in range(1 + round(math.log2(longest / T))))}
        result['by_length'] = {
            str(n): float(np.mean(by_token[0 if n == T else ends[n // 2]:end])) for n, end in ends.items()
        }
    if 'lengths' in cell:
        result['by_length'] = {str(n): zoology.recall(
            model, Sequences(cell, cell['test_size'], 3 * cell['seed'] + 3, n), cell['batch_size'], answers,
        ) for n in cell['lengths']}
    return result


def describe_task(cell: dict) -> str:
    if cell['task'] == 'products':
        return cell['task_options']['group']
    return ('noisy ' if 'noise' in cell['task_options'] else '') + cell['task']


def draw(report: dict, path: Path | str) -> None:
    """A panel for each task, a line for each mixer: accuracy by length, or in training where no longer sequences were read."""
    runs = report['runs']
    tasks, mixers = (list(dict.fromkeys(x)) for x in (
        [describe_task(run['cell']) for run in runs], [run['cell']['mixer'] for run in runs],
    ))
    columns = 2 if len(tasks) < 5 else 3
    rows = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(5.5 * columns, 0.6 + 3.2 * rows), dpi=140, layout='constrained')
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    for task, axis in zip(tasks, axes, strict=False):
        for run in runs:
            if describe_task(run['cell']) == task:
                name = run['cell']['mixer']
                options = style(name, mixers) | ({'linestyle': ':'} if 'negative' in name else {})
                points = run['by_length'].items() if 'by_length' in run else run['history']
                axis.plot(*zip(*((int(x), y) for x, y in points), strict=True), **options)
        axis.set(title=task, xlabel='step', ylim=(0, 1.03))
        if 'by_length' in runs[0]:
            axis.set(title=f'{task}, guessing {1 / len(cayley_table(task)):.0%}', xlabel='tokens up to')
            axis.set_xscale('log', base=2)
            axis.set_xticks([int(n) for n in runs[0]['by_length']], list(runs[0]['by_length']))
        axis.yaxis.set_major_formatter(PercentFormatter(1))
        tidy(axis)
    for axis in axes[len(tasks):]:
        axis.remove()
    for axis in figure.axes:
        label_ends(axis)
    axes[0].set_ylabel('accuracy')
    figure.suptitle(report['setting']['title'], fontsize=11)
    figure.savefig(path)
