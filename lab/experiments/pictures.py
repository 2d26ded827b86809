"""The pictures of `lab/experiments/results/`, drawn again from the JSON files beside them.

    python -m lab.experiments pictures [NAME ...]
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report.pictures import main_of
from lab.experiments import depth, extrapolation, language_modeling, objectives, recall, state_size, synthetic
from lab.experiments.report import RESULTS

# the function that draws files by the end of their name
DRAW: dict[str, Callable] = {
    'mqar_exact': recall.draw, 'mqar_state': state_size.draw, 'mqar_small': recall.draw, 'mqar_zoology_small': recall.draw,
    'mqar_depth': depth.draw, 'state_tracking': synthetic.draw, 'mad_small': synthetic.draw,
    **dict.fromkeys(('lm_small', 'lm_families', 'lm_gates', 'lm_2M'), language_modeling.draw),
    'extrapolation': extrapolation.draw, 'extrapolation_families': extrapolation.draw, 'extrapolation_2M': extrapolation.draw,
    'objectives': objectives.draw,
}


def main(args: list[str] | None = None) -> None:
    main_of('python -m lab.experiments pictures', DRAW, RESULTS, args)
