"""Shared by the results page's sections: tables, times and machines as text."""

from __future__ import annotations


def table(columns: list[str], rows: list[list]) -> str:
    lines = ['| ' + ' | '.join(columns) + ' |', '|' + ' --- |' * len(columns)]
    return '\n'.join(lines + ['| ' + ' | '.join(map(str, row)) + ' |' for row in rows])


def measured_on(machine: dict) -> str:
    versions = ', '.join(f'{name} {x}' for name, x in machine['versions'].items() if x)
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    return f"On {machine['device']}, {threads}; {versions}; commit {machine['commit']}."


def place(report: dict) -> str:
    device = report['machine']['device']
    return 'a CPU' if device.startswith('CPU') else device


def milliseconds(figures: dict | None) -> str:
    if figures is None:
        return ''
    return f"{figures['ms']:.1f} ({figures['ms_low']:.1f} to {figures['ms_high']:.1f})"
