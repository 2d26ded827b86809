"""How far predictions are from what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean, median

GROUPS = ('fitted', 'left out')
# the part of timings with loops as long that an error bar covers
COVERED = 0.9
# instructions of a loop that any scheduler's instruction cache holds, by what an H200 showed
FITTING = 768


def loop_class(loops: Iterable[Sequence[int]]) -> str:
    """Of the kernels of a pass, by their longest innermost loop."""
    longest = max((x for each in loops for x in each), default=0)
    return f'up to {FITTING}' if longest <= FITTING else f'above {FITTING}'


def error(row: dict) -> float:
    return abs(row['predicted_ms'] / row['ms'] - 1)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of them does not exceed."""
    return sorted(values)[max(-int(-part * len(values) // 1) - 1, 0)]


def errors(rows: list[dict]) -> dict:
    """Of some points."""
    every = [error(row) for row in rows]
    return {
        'points': len(rows), 'geometric_mean': round(geometric_mean(row['predicted_ms'] / row['ms'] for row in rows), 3),
        'median': round(median(every), 3), 'nine_of_ten': round(quantile(every, COVERED), 3), 'largest': round(max(every), 3),
    }


def summary(rows: list[dict]) -> dict[str, dict]:
    """Of each group, and of each operator."""
    groups: dict[str, list[dict]] = {name: [r for r in rows if r['group'] == name] for name in GROUPS}
    for row in rows:
        groups.setdefault(f'{row["kernel"]} {row["direction"]}', []).append(row)
    return {name: errors(some) for name, some in groups.items() if some}


def error_bars(rows: list[dict]) -> dict[str, dict]:
    """By class of loops: how far most predictions are off, but for passes that waited for the host."""
    classes: dict[str, list[float]] = {}
    for row in rows:
        if row['group'] in GROUPS:
            classes.setdefault(row['loops'], []).append(error(row))
    return {name: {'points': len(x), 'within': round(quantile(x, COVERED), 3)} for name, x in classes.items()}
