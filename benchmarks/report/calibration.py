"""The picture of published timings against predicted ones, and the sections of the results page that rest on them."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.report.plots import BLUE, FONT, GREYS, ORANGE, tidy
from benchmarks.report.tables import table

MARKERS = 'osD^v<>PX*'
# the band around equality that is drawn
BAND = 0.15


def draw(report: dict, path: str) -> None:
    """Predicted against measured milliseconds, with the range of the times that Longhorn's passes are predicted to take."""
    rows, own = report['rows'], report['own_ms']
    figure = Figure(figsize=(7.5, 7), dpi=140, layout='constrained')
    axis = figure.subplots()
    low, high = (f(x for row in rows for x in (row['ms'], row['predicted_ms'])) for f in (min, max))
    ends = [low / 1.5, high * 1.5]
    axis.plot(ends, ends, color=GREYS[0], linewidth=0.8)
    band = [[x * part for x in ends] for part in (1 - BAND, 1 + BAND)]
    axis.fill_between(ends, *band, color=GREYS[-1], alpha=0.3, linewidth=0)
    axis.axhspan(*own, color=BLUE, alpha=0.08, linewidth=0)
    axis.text(ends[0] * 1.1, own[0] * 1.1, "Longhorn's passes on the results page", va='bottom', fontsize=FONT, color=BLUE)
    kernels = list(dict.fromkeys(row['kernel'] for row in rows))
    for marker, kernel in zip(MARKERS, kernels, strict=False):
        some = [row for row in rows if row['kernel'] == kernel]
        fitted = some[0]['group'] == 'fitted'
        axis.plot(
            [row['ms'] for row in some], [row['predicted_ms'] for row in some], linestyle='', marker=marker, markersize=4.5,
            color=GREYS[0] if fitted else ORANGE, markerfacecolor='none' if fitted else ORANGE,
            label=kernel.lstrip('_') if fitted else f'{kernel} ({some[0]["group"]})',
        )
    axis.set(xscale='log', yscale='log', xlim=ends, ylim=ends, xlabel='measured, ms', ylabel='predicted, ms')
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter(StrMethodFormatter('{x:g}'))
    tidy(axis)
    axis.legend(fontsize=FONT, frameon=False, loc='lower right')
    axis.set_title(f'Published timings of {len(rows)} calls; the band is {BAND:.0%} on both sides')
    figure.savefig(path)


INTRODUCTION = """## How far predicted times are off

`python -m benchmarks calibrate`. {points} timings that others published ([sources](../../benchmarks/calibration/README.md))
beside what is predicted for the same calls. Constants of the model were set by the points called fitted alone. "Other code"
compiles to something else today than what was timed. {missing} points are not predicted; the file says why.
Made with {versions}; commit {commit}."""


def calibrated(report: dict) -> str:
    """Errors of each group of points and of each operator."""
    lines = [
        [name, e['points'], f'{e["geometric_mean"]:.2f}', *(f'{e[part]:.0%}' for part in ('median', 'nine_of_ten', 'largest'))]
        for name, e in report['errors'].items()
    ]
    machine = report['machine']
    versions = sorted({row['made_with'] for row in report['rows']}) + [f'triton {machine["versions"]["triton"]}']
    text = INTRODUCTION.format(
        points=len(report['rows']), missing=len(report['not_predicted']), versions=', '.join(versions),
        commit=machine['commit'],
    )
    columns = ['points', 'number', 'predicted / measured', 'median error', 'nine of ten within', 'largest']
    return text + '\n\n' + table(columns, lines)
