"""Parts of a section of the experiments' page: its heading, its predictions, means and spreads."""

from __future__ import annotations

from benchmarks.report.tables import measured_on, table


def spread(values: list[float], form: str) -> str:
    """The mean and, of several values, the lowest and highest."""
    mean = f'{sum(values) / len(values):{form}}'
    return f'{mean} ({min(values):{form}} to {max(values):{form}})' if len(values) > 1 else mean


def machines(report: dict) -> str:
    """What the runs were measured on: each has a machine of its own, or in older files that of the last."""
    commits: dict[str, list[str]] = {}
    for text in dict.fromkeys(measured_on(run.get('machine', report['machine'])) for run in report['runs']):
        place, commit = text.removesuffix('.').split('; commit ')
        commits.setdefault(place, []).append(commit)
    return ' '.join(f'{place}; commit {", ".join(some)}.' for place, some in commits.items())


def heading(report: dict, text: str, command: str = 'mqar') -> str:
    """A section's title, its command and what that ran on, before `text`."""
    setting = report['setting']
    return (f'## {setting["title"]}\n\n`python -m lab.experiments {command} lab/experiments/settings/{setting["name"]}.json`. '
            f'{machines(report)} {text}')


def options(report: dict) -> str:
    return ', '.join(f'{name} {value}' for name, value in report['setting']['options'].items())


def shares(values: list[float]) -> str:
    return spread(values, '.1%')


def predictions(setting: dict) -> str:
    """What was written before the runs, and what came of it."""
    return table(['predicted before the runs', 'found'], list(zip(setting['predictions'], setting['found'], strict=True)))
