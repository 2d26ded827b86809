"""How far predictions are from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean, median

GROUPS = ('fitted', 'left out', 'other code')


def error(row: dict) -> float:
    return abs(row['predicted_ms'] / row['ms'] - 1)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of them does not exceed."""
    return sorted(values)[max(-int(-part * len(values) // 1) - 1, 0)]


def errors(rows: list[dict]) -> dict:
    """Of some points; `within_15` is a part of them."""
    every = [error(row) for row in rows]
    return {
        'points': len(rows), 'geometric_mean': round(geometric_mean(row['predicted_ms'] / row['ms'] for row in rows), 3),
        'median': round(median(every), 3), 'nine_of_ten': round(quantile(every, 0.9), 3), 'largest': round(max(every), 3),
        'within_15': round(sum(x <= 0.15 for x in every) / len(every), 3),
    }


def summary(rows: list[dict]) -> dict[str, dict]:
    """Of each group, and of each operator."""
    groups: dict[str, list[dict]] = {name: [r for r in rows if r['group'] == name] for name in GROUPS}
    for row in rows:
        groups.setdefault(f'{row["kernel"]} {row["direction"]} {row["machine"]}', []).append(row)
    return {name: errors(some) for name, some in groups.items() if some}
