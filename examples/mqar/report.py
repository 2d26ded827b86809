"""The results of a run: figures as JSON, and a readable summary."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import version

import torch
from rich.console import Console
from rich.table import Table

from examples.mqar.data import MQAR
from examples.mqar.evaluate import Answer
from fla_longhorn import __version__


def describe_machine(device: torch.device) -> dict:
    """Versions and hardware behind the figures."""
    packages = ('flash-linear-attention', 'transformers', 'torch', 'numpy')
    return {
        'versions': {'fla-longhorn': __version__, 'python': platform.python_version(), **{p: version(p) for p in packages}},
        'device': torch.cuda.get_device_name(device) if device.type == 'cuda' else f'CPU ({platform.machine()})',
        'cpu_count': os.cpu_count(),
        'threads': torch.get_num_threads(),
    }


def describe_answers(answers: list[Answer]) -> list[dict]:
    return [{**asdict(x), 'right': x.answer == x.truth} for x in answers]


def print_answers(console: Console, task: MQAR, answers: list[Answer]) -> None:
    """A table of questions; keys are shown as k1, k2, ... and values as v0, v1, ..."""
    half = task.vocab_size // 2

    def name(token: int) -> str:
        return f'v{token - half}' if token >= half else f'k{token}' if token else 'blank'

    table = Table(title='Held-out questions, answered by generate() of the reloaded checkpoint', show_lines=True)
    for column in ('pairs in the prompt', 'query', 'answer', 'truth', ''):
        table.add_column(column)
    for x in answers:
        pairs = (f'[bold]{name(k)}:{name(v)}[/]' if k == x.query else f'[dim]{name(k)}:{name(v)}[/]' for k, v in x.pairs)
        mark = '[green]right[/]' if x.answer == x.truth else '[red]wrong[/]'
        table.add_row(' '.join(pairs), name(x.query), name(x.answer), name(x.truth), mark)
    console.print(table)
