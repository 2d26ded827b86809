"""The pictures of `benchmarks/results/`, drawn again from the JSON files beside them.

    python -m benchmarks.report.pictures [NAME ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from benchmarks.experiments import depth, extrapolation, language_modeling, mqar, objectives
from benchmarks.ops import run as ops
from benchmarks.report import plots
from benchmarks.report.page import RESULTS

# what draws the files whose name ends so
DRAW: dict[str, Callable] = {
    'ops': ops.draw, 'model': plots.draw_models, 'decode': plots.draw_models, 'mqar_exact': mqar.draw, 'mqar_small': mqar.draw,
    'mqar_depth': depth.draw, 'mqar_zoology_small': mqar.draw, 'lm_small': language_modeling.draw,
    'extrapolation': extrapolation.draw, 'objectives': objectives.draw,
}


def pictures() -> dict[str, Callable]:
    """The committed pictures, by name, with what draws each."""
    names = sorted(path.stem for path in RESULTS.glob('*.png'))
    return {name: next(draw for ending, draw in DRAW.items() if name.endswith(ending)) for name in names}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.report.pictures', description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', metavar='NAME', help='only these')
    options = parser.parse_args(args)
    known = pictures()
    for name in options.names or known:
        known[name](json.loads((RESULTS / f'{name}.json').read_text()), RESULTS / f'{name}.png')
        print(RESULTS / f'{name}.png')


if __name__ == '__main__':
    main()
