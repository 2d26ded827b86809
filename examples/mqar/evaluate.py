"""Recall of a trained model by number of pairs, and a few questions answered by `generate`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader

from examples.mqar.data import IGNORE, MQAR, HeldOut

# recall is measured at no more than this many numbers of pairs within those of training
MAX_COUNTS = 16


def right_answers(predicted, labels):
    """Whether each query was answered right, given the prediction after each position and the labels, `[N, T]` both."""
    asked = labels[:, 1:] != IGNORE
    return (predicted[:, :-1] == labels[:, 1:])[asked]


@torch.inference_mode()
def measure_recall(model, data: HeldOut, batch_size: int) -> float:
    """The share of queries that `model` answers right."""
    right = []
    for batch in DataLoader(data, batch_size=batch_size):
        predicted = model(input_ids=batch['input_ids'].to(model.device), use_cache=False).logits.argmax(dim=-1).cpu()
        right.append(right_answers(predicted, batch['labels']))
    return torch.cat(right).float().mean().item()


def pair_counts(task: MQAR) -> list[int]:
    """Numbers of pairs to measure at: up to the most in training, then up to twice that, as far as the keys go."""
    P = task.num_pairs
    trained = np.linspace(1, P, min(P, MAX_COUNTS))
    beyond = np.linspace(P, min(2 * P, task.num_keys), 5)[1:]
    return sorted({round(n) for n in (*trained, *beyond)})


def recall_by_pairs(model, task: MQAR, size: int, seed: int, batch_size: int) -> list[dict]:
    """The recall at each of `pair_counts`, over `size` held-out sequences each."""
    results = []
    for n in pair_counts(task):
        wider = task.with_pairs(n)
        recall = measure_recall(model, HeldOut(wider, size, (seed, 2, n), num_pairs=n), batch_size)
        results.append({'num_pairs': n, 'seq_len': wider.seq_len, 'recall': recall, 'trained': n <= task.num_pairs})
    return results


@dataclass(frozen=True)
class Answer:
    """A question, with its pairs as (key, value) tokens, and the answer of `generate`."""

    pairs: list[tuple[int, int]]
    query: int
    answer: int
    truth: int


def ask(model, task: MQAR, size: int, seed: int) -> list[Answer]:
    """Cut held-out sequences after a query, a different one in each, and let `generate` continue."""
    answers = []
    for i, row in enumerate(HeldOut(task, size, (seed, 3), num_pairs=task.num_pairs)):
        asked = (row['labels'] != IGNORE).nonzero().flatten()
        end = asked[i * len(asked) // size].item()
        prompt = row['input_ids'][None, :end].to(model.device)
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False)
        answers.append(Answer(
            pairs=[tuple(pair) for pair in row['input_ids'][: 2 * task.num_pairs].view(-1, 2).tolist()],
            query=prompt[0, -1].item(),
            answer=output[0, -1].item(),
            truth=row['labels'][end].item(),
        ))
    return answers
