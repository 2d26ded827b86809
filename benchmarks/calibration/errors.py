"""How far predictions are from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean, median

GROUPS = ('fitted', 'left out', 'other code')
# kernels that are like each other, by the operators of the points: matrix products of chunks, rows that stream through once,
# and a state that is carried from token to token in registers
KINDS = {
    'chunks': ('chunk_linear_attn', 'chunk_simple_gla', 'chunk_gla', 'chunk_delta_rule'),
    'streams': ('layer_norm', 'rms_norm', 'cross_entropy', 'relu_squared'),
    'recurrences': ('fused_recurrent_hgrn', '_selective_scan_update_kernel (SSU)'),
}
# the part of a kind's points that its error bar covers
COVERED = 0.9


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


def error_bars(rows: list[dict]) -> dict[str, dict]:
    """Of each kind of kernels: how far predictions of most of its points are off, but for points of other code."""
    out = {}
    for kind, kernels in KINDS.items():
        some = [row for row in rows if row['kernel'] in kernels and row['group'] != 'other code']
        if some:
            out[kind] = {'points': len(some), 'within': round(quantile([error(row) for row in some], COVERED), 3)}
    return out


def like(name: str) -> str:
    """The kind of a predicted pass: the diagonal form is a recurrence, the exact form and fla's operators are chunks."""
    return 'recurrences' if name.startswith('diagonal') else 'chunks'


def with_error_bars(report: dict, rows: list[dict]) -> dict:
    """A report of predicted times with an error bar in each row that has a time, by the `rows` of a calibration table."""
    bars = error_bars(rows)
    return report | {'rows': [
        row | {'like': like(row['pass']), **bars[like(row['pass'])]} if 'ms' in row else row for row in report['rows']
    ]}
