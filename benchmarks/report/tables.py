"""Tables as text."""

from __future__ import annotations


def table(columns: list[str], rows: list[list]) -> str:
    lines = ['| ' + ' | '.join(columns) + ' |', '|' + ' --- |' * len(columns)]
    return '\n'.join(lines + ['| ' + ' | '.join(map(str, row)) + ' |' for row in rows])
