"""What pictures of results have in common.

At most `MOST` lines per panel, each labelled at its end; Longhorn's in colour, the others grey.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

MOST = 6
BLUE, ORANGE, GREEN = '#1f5fa8', '#d9822b', '#2f8f5b'
GREYS, DASHES = ('#4f555d', '#7d848d', '#a3a9b1'), ('-', '--', ':', '-.')
FONT = 8


def own(name: str) -> bool:
    """Whether a series is Longhorn's: an operator, a model, or one of its updates."""
    return 'longhorn' in name.lower() or name.startswith(('diagonal', 'exact', 'scalar beta'))


def shown(names: list[str], costs: dict[str, float]) -> list[str]:
    """Names for a panel: Longhorn's, then the others with the lowest costs, in the order of `names`."""
    ranked = sorted(names, key=lambda name: (not own(name), costs.get(name, float('inf'))))[:MOST]
    return [name for name in names if name in ranked]


def style(name: str, names: list[str]) -> dict:
    """One colour per update of Longhorn, dashed with normalised keys; grey for the others."""
    if own(name):
        color = ORANGE if 'exact' in name else GREEN if 'scalar' in name else BLUE
        return {'color': color, 'linestyle': '--' if 'normalised' in name else '-', 'linewidth': 1.8, 'marker': 'o',
                'markersize': 3.5, 'label': name}
    i = [other for other in names if not own(other)].index(name)
    return {'color': GREYS[i % len(GREYS)], 'linestyle': DASHES[i % len(DASHES)], 'linewidth': 1.2, 'marker': 's',
            'markersize': 2.5, 'label': name}


def tidy(axis: Axes) -> None:
    """A faint grid, and no frame above and on the right."""
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[['top', 'right']].set_visible(False)
    axis.title.set_fontsize(10)
    axis.tick_params(labelsize=FONT)


def finish(axis: Axes, title: str, x: str, y: str, log_y: bool = True) -> None:
    """Titles and scales, x in powers of two, with plain numbers on both axes."""
    axis.set(title=title, xlabel=x, ylabel=y, yscale='log' if log_y else 'linear')
    axis.set_xscale('log', base=2)
    if log_y:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter(StrMethodFormatter('{x:g}'))
        ticks.set_minor_formatter(NullFormatter())
    tidy(axis)


def spread_out(ys: list[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending positions as close to the ascending `ys` as the gap and the limits allow."""
    blocks = []
    for y in ys:
        blocks.append([y, 1])
        while True:
            centre, count = blocks[-1]
            blocks[-1][0] = centre = max(min(centre, high - (count - 1) * gap / 2), low + (count - 1) * gap / 2)
            if len(blocks) == 1 or centre - blocks[-2][0] >= (count + blocks[-2][1]) * gap / 2:
                break
            centre, count = blocks.pop()
            other, more = blocks[-1]
            blocks[-1] = [(centre * count + other * more) / (count + more), count + more]
    return [centre + (i - (count - 1) / 2) * gap for centre, count in blocks for i in range(count)]


def label_ends(axis: Axes, size: float = FONT) -> None:
    """Label each line at the right edge, level with its end, in its colour.

    Labels that would overlap are moved up or down. A thin line connects a moved label, or one of a shorter line, with the end.
    """
    axis.figure.draw_without_rendering()
    box = axis.get_window_extent()
    points = 72 / axis.figure.dpi
    ends = sorted(
        ((*line.get_transform().transform(line.get_xydata()[-1]), line) for line in axis.lines), key=lambda end: end[1],
    )
    places = spread_out([y for _, y, _ in ends], 1.25 * size / points, box.y0, box.y1)
    for (x, y, line), place in zip(ends, places, strict=True):
        near = abs(place - y) * points < 2 and x > box.x0 + 0.9 * box.width
        axis.annotate(
            line.get_label(), line.get_xydata()[-1], xycoords=line.get_transform(), va='center', fontsize=size,
            xytext=(1.02, (place - box.y0) / box.height), textcoords='axes fraction', color=line.get_color(),
            annotation_clip=False,
            arrowprops=None if near else {
                'arrowstyle': '-', 'color': line.get_color(), 'linewidth': 0.5, 'alpha': 0.6, 'shrinkA': 1,
                'shrinkB': 2, 'relpos': (0, 0.5),
            },
        )


def plot_band(axis: Axes, xs: list, curves: list[list[float]], label: str, options: dict) -> None:
    """Plot the mean of several curves over the same `xs`, with a band from the lowest to the highest."""
    columns = list(zip(*curves, strict=True))
    axis.plot(xs, [sum(ys) / len(ys) for ys in columns], **options | {'label': label})
    low, high = [min(ys) for ys in columns], [max(ys) for ys in columns]
    axis.fill_between(xs, low, high, color=options['color'], alpha=0.12, linewidth=0)
