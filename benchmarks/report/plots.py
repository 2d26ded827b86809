"""The pictures of the benchmarks' reports, and the options that every report shares.

At most `MOST` lines per panel, each labelled at its end; Longhorn's in colour, the others grey.
"""

from __future__ import annotations

import argparse

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

MOST = 6
BLUE, ORANGE, GREEN = '#1f5fa8', '#d9822b', '#2f8f5b'
GREYS, DASHES = ('#4f555d', '#7d848d', '#a3a9b1'), ('-', '--', ':', '-.')
FONT = 8


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--json', metavar='FILE', help='write the figures here')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the figures here')
    parser.add_argument('--compare', metavar='OLD.json', help='compare with the times of an earlier report')


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


def plot_lines(axis: Axes, lines: dict[str, list[tuple]], names: list[str]) -> None:
    """Plot medians over x, Longhorn's with the quartiles as a band; `lines` holds (x, figures) by name."""
    for name, points in lines.items():
        xs, figures = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        options = style(name, names)
        axis.plot(xs, [f['ms'] for f in figures], **options)
        if own(name):
            low, high = [f['ms_low'] for f in figures], [f['ms_high'] for f in figures]
            axis.fill_between(xs, low, high, color=options['color'], alpha=0.12, linewidth=0)


def plot_bars(axis: Axes, bars: dict[str, float], form: str, title: str, x: str) -> None:
    """Plot one bar per name, from the top, with its value at the end."""
    axis.barh(list(bars), list(bars.values()), color=[BLUE if own(name) else GREYS[-1] for name in bars])
    for i, value in enumerate(bars.values()):
        axis.text(value, i, ' ' + form.format(value), va='center', fontsize=FONT)
    axis.invert_yaxis()
    axis.set(title=title, xlabel=x)
    tidy(axis)
    axis.grid(visible=False)


def describe(report: dict) -> str:
    machine = report['machine']
    torch, fla = (machine['versions'][name] for name in ('torch', 'flash-linear-attention'))
    return f'{machine["device"]}, {machine["threads"]} threads, torch {torch}, fla {fla}, commit {machine["commit"]}'


def draw_operators(lines: dict, bars: dict[str, float], shapes: dict[str, str], report: dict, path: str) -> None:
    """Plot time against T and K for both passes, and the others' times as multiples of Longhorn's.

    `lines` holds lines by (pass, 'T' or 'K'); `shapes` says what else is fixed, for 'T', 'K' and 'bars'.
    """
    figure = Figure(figsize=(11.5, 9), dpi=140, layout='constrained')
    axes = figure.subplot_mosaic(
        [['forward T', 'forward_backward T'], ['forward K', 'forward_backward K'], ['bars', 'bars']],
        height_ratios=[1, 1, 0.35 + 0.055 * len(bars)],
    )
    names = list(dict.fromkeys(name for group in lines.values() for name in group))
    for (name, x), group in lines.items():
        axis = axes[f'{name} {x}']
        plot_lines(axis, group, names)
        over = {'T': 'sequence length', 'K': 'state size'}[x]
        finish(axis, f'{name.replace("_", " + ").capitalize()}, by {over} ({shapes[x]})',
               {'T': 'tokens', 'K': 'K, state entries per channel'}[x], 'milliseconds')
    plot_bars(axes['bars'], bars, '{:.2f}', 'Forward + backward: time as a multiple of chunk_longhorn\'s', shapes['bars'])
    if bars:
        axes['bars'].set_xscale('log')
        axes['bars'].xaxis.set_major_formatter(StrMethodFormatter('{x:g}'))
    figure.suptitle(f'Operators. {describe(report)}', fontsize=10)
    for (name, x), group in lines.items():
        if group:
            label_ends(axes[f'{name} {x}'])
    figure.savefig(path)


# compared with Longhorn in a picture of models: the first of them that ran
PEERS = ('GPT-2', 'Llama', "transformers' Mamba", "transformers' Mamba2", 'Mamba', 'Mamba2', 'GLA', 'DeltaNet', 'Transformer')


def plot_generation(axis: Axes, rows: dict[str, dict], dtype: str, batch: int, names: list[str]) -> None:
    """Plot time per token against the length of the prompt: it grows for attention, not for a state of fixed size."""
    lines = {}
    for name in names:
        points = [(x['prompt'], x['token']) for x in rows[name] if (x['dtype'], x['batch']) == (dtype, batch)]
        if points:
            lines[name] = points
    plot_lines(axis, lines, names)
    finish(axis, f'Time per token, {dtype}, batch {batch}', 'tokens of context', 'milliseconds', log_y=False)
    axis.set_ylim(0, None)


def draw_models(report: dict, path: str) -> None:
    """Training tokens per second, and time per generated token and bytes of the cache against the prompt's length.

    One panel per dtype and batch; the cache is that of the first.
    """
    rows = [row for row in report['rows'] if row['status'] == 'ok']
    trained = {row['model']: row['training']['tokens_per_s'] for row in rows if 'training' in row}
    generated = {row['model']: row['generation'] for row in rows if 'generation' in row}
    # fla's families with Longhorn have Longhorn's times; variants are in the table
    known = [name for name in generated if name in (*PEERS, 'Longhorn', 'Longhorn, exact')]
    names = shown(known, {name: i for i, name in enumerate(PEERS)})
    groups = list(dict.fromkeys((x['dtype'], x['batch']) for x in sum(generated.values(), [])))

    panels = len(groups) + bool(trained) + bool(groups)
    columns = 3 if panels % 3 == 0 or panels > 4 else 2
    lines = -(-max(panels, 1) // columns)
    figure = Figure(figsize=(4.4 * columns, 4.2 * lines), dpi=140, layout='constrained')
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.remove()
    if trained:
        plot_bars(axes.pop(0), trained, '{:,.0f}', 'Training speed', 'tokens per second')
    for axis, group in zip(axes, groups, strict=False):
        plot_generation(axis, generated, *group, names)
    if groups:
        state, (dtype, batch) = axes[len(groups)], groups[0]
        for name in names:
            some = [x for x in generated[name] if (x['dtype'], x['batch']) == (dtype, batch)]
            points = [(x['prompt'], x['state_bytes'] / 2**20) for x in some]
            if points:
                state.plot(*zip(*points, strict=True), **style(name, names))
        finish(state, f'Size of the cache, {dtype}, batch {batch}', 'tokens of context', 'MB')
    figure.suptitle(f'Models. {describe(report)}', fontsize=10)
    for axis in axes[:len(groups) + 1] if groups else []:
        label_ends(axis)
    figure.savefig(path)
