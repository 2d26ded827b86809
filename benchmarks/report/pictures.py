"""The pictures of `benchmarks/results/`, drawn again from the JSON files beside them.

    python -m benchmarks pictures [NAME ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.ops import run as ops
from benchmarks.report import plots
from benchmarks.report.page import RESULTS

# the function that draws files by the end of their name
DRAW: dict[str, Callable] = {
    'ops': ops.draw, 'model': plots.draw_models, 'decode': plots.draw_models,
}


def pictures(draw: dict[str, Callable], results: Path) -> dict[Path, Callable]:
    """The committed pictures of a folder, each with the function that draws it."""
    found = {path: [draw[ending] for ending in draw if path.stem.endswith(ending)] for path in sorted(results.glob('*.png'))}
    return {path: functions[0] for path, functions in found.items()}


def main_of(command: str, draw: dict[str, Callable], results: Path, args: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog=command, description='Draw the pictures of results again from the JSON files.')
    parser.add_argument('names', nargs='*', metavar='NAME', help='only these')
    options = parser.parse_args(args)
    known = {path.stem: (path, function) for path, function in pictures(draw, results).items()}
    for name in options.names or known:
        path, function = known[name]
        function(json.loads(path.with_suffix('.json').read_text()), path)
        print(path)


def main(args: list[str] | None = None) -> None:
    main_of('python -m benchmarks pictures', DRAW, RESULTS, args)
