"""Tables and machines as text."""

from __future__ import annotations


def table(columns: list[str], rows: list[list]) -> str:
    lines = ['| ' + ' | '.join(columns) + ' |', '|' + ' --- |' * len(columns)]
    return '\n'.join(lines + ['| ' + ' | '.join(map(str, row)) + ' |' for row in rows])


def measured_on(machine: dict) -> str:
    versions = ', '.join(f'{name} {x}' for name, x in machine['versions'].items() if x)
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return f"On {machine['device']}, {threads}; {versions}; commit {machine['commit']}."
