"""lm_eval's results beside the figures of the paper (Table 2) and of its reviews (recall, texts read once and twice)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """`columns` maps labels to `(task, metric)`; `printed` maps models to published figures in percent, without the mean."""

    title: str
    columns: dict[str, tuple[str, str]]
    printed: dict[str, tuple[float, ...]]


def recall(suffix: str) -> dict[str, tuple[str, str]]:
    names = {'FDA': 'fda', 'SWDE': 'swde', 'NQ': 'nq', 'SQuAD': 'squad', 'TriviaQA': 'triviaqa', 'DROP': 'drop'}
    return {label: (f'longhorn_{name}{suffix}', 'contains') for label, name in names.items()}


TABLES = (
    Table(
        'Table 2: 1.3B parameters, 100B tokens of SlimPajama, zero-shot, in %',
        {
            'PIQA': ('piqa', 'acc'), 'HellaSwag': ('hellaswag', 'acc_norm'), 'WinoGrande': ('winogrande', 'acc'),
            'ARC-e': ('arc_easy', 'acc'), 'ARC-c': ('arc_challenge', 'acc_norm'), 'OBQA': ('openbookqa', 'acc'),
            'SIQA': ('social_iqa', 'acc_norm'), 'BoolQ': ('boolq', 'acc'),
        },
        {
            'LLaMA': (55.08, 55.36, 71.73, 59.26, 32.19, 43.35, 45.16, 62.13),
            'GLA': (55.55, 49.10, 71.12, 58.86, 28.11, 41.67, 44.91, 59.21),
            'Mamba': (54.21, 53.61, 71.67, 61.05, 30.15, 43.94, 44.18, 59.22),
            'Longhorn': (55.78, 52.30, 71.00, 60.63, 29.53, 43.55, 44.68, 61.29),
        },
    ),
    Table(
        'Recall, each text read once (reviews), in %', recall(''),
        {'Mamba': (33.2, 35.0, 26.6, 37.4, 56.3, 20.4), 'Longhorn': (40.2, 33.2, 27.6, 35.0, 58.5, 21.3)},
    ),
    Table(
        'Recall, each text read twice (reviews), in %', recall('_twice'),
        {'Mamba': (40.6, 36.2, 32.6, 52.7, 56.9, 31.5), 'Longhorn': (50.4, 42.3, 33.2, 55.0, 55.9, 33.3)},
    ),
)


def row(name: str, values: list[float | None]) -> str:
    """A line of a table, with the mean if no value is missing."""
    there = [x for x in values if x is not None]
    mean = f'{sum(there) / len(there):.2f}' if len(there) == len(values) else 'not run'
    return f'| {name} | ' + ' | '.join('not run' if x is None else f'{x:.2f}' for x in values) + f' | {mean} |'


def value_of(results: Mapping[str, Mapping], task: str, metric: str) -> float | None:
    """In percent, or `None` if the task was not run."""
    found = results.get(task, {}).get(f'{metric},none')
    return None if found is None else 100 * found


def markdown(results: Mapping[str, Mapping]) -> str:
    """The tables of which lm_eval's `results` of a model have at least one task; raises `ValueError` if there are none."""
    blocks = []
    for table in TABLES:
        ours = [value_of(results, *column) for column in table.columns.values()]
        if any(x is not None for x in ours):
            head = f'| | {" | ".join(table.columns)} | mean |\n|---|{"---:|" * (len(table.columns) + 1)}'
            rows = [row(f'{name}, printed', list(printed)) for name, printed in table.printed.items()]
            blocks.append('\n'.join([table.title, '', head, *rows, row('this run', ours)]))
    if not blocks:
        raise ValueError(f'results has none of the tasks of the tables: got {sorted(results)}')
    return '\n\n'.join(blocks)
