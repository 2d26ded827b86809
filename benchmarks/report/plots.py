"""The pictures of the benchmarks' reports, and the options that every report shares."""

from __future__ import annotations

import argparse

from matplotlib import colormaps
from matplotlib.figure import Figure

COLORS = colormaps['tab20'].colors[::2] + colormaps['tab20b'].colors[::3]


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--json', metavar='FILE', help='write the figures here')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the figures here')
    parser.add_argument('--compare', metavar='OLD.json', help='hold the times against those of an earlier report')


def style(name: str, names: list[str]) -> dict:
    """Longhorn in solid lines with dots, everything else dashed."""
    own = 'longhorn' in name.lower()
    return {
        'color': COLORS[names.index(name) % len(COLORS)], 'linestyle': '-' if own else '--', 'linewidth': 1.6 if own else 1,
        'marker': 'o' if own else 's', 'markersize': 3, 'label': name,
    }


def tidy(axis) -> None:
    """A faint grid, and no frame above and on the right."""
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[['top', 'right']].set_visible(False)


def plot_band(axis, xs: list, curves: list[list[float]], label: str) -> None:
    """The mean of several curves over the same `xs`, and the range between the lowest and the highest."""
    columns = list(zip(*curves, strict=True))
    line, = axis.plot(xs, [sum(ys) / len(ys) for ys in columns], marker='o', markersize=3, label=label)
    axis.fill_between(xs, [min(ys) for ys in columns], [max(ys) for ys in columns], color=line.get_color(), alpha=0.15)


def finish(axis, title: str, x: str, y: str) -> None:
    axis.set(title=title, xlabel=x, ylabel=y, xscale='log', yscale='log')
    axis.set_xscale('log', base=2)
    tidy(axis)


def plot_lines(axis, lines: dict[str, list[tuple]], names: list[str]) -> None:
    """Medians over x with the quartiles as a band; `lines` holds (x, figures) by name."""
    for name, points in lines.items():
        xs, figures = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        options = style(name, names)
        axis.plot(xs, [f['ms'] for f in figures], **options)
        low, high = [f['ms_low'] for f in figures], [f['ms_high'] for f in figures]
        axis.fill_between(xs, low, high, color=options['color'], alpha=0.12, linewidth=0)


def describe(report: dict) -> str:
    machine = report['machine']
    torch, fla = (machine['versions'][name] for name in ('torch', 'flash-linear-attention'))
    return f'{machine["device"]}, {machine["threads"]} threads, torch {torch}, fla {fla}, commit {machine["commit"]}'


def draw_operators(lines: dict, bars: dict[str, float], shape: str, report: dict, path: str) -> None:
    """Time against T and K for both passes, and how many times as long as Longhorn others take."""
    names = list(dict.fromkeys(name for group in lines.values() for name in group))
    figure = Figure(figsize=(17, 9), dpi=100, layout='constrained')
    axes = figure.subplot_mosaic(
        [['forward T', 'forward K', 'bars'], ['forward_backward T', 'forward_backward K', 'bars']],
        width_ratios=[1, 1, 1.1],
    )
    for (name, x), group in lines.items():
        axis = axes[f'{name} {x}']
        plot_lines(axis, group, names)
        finish(axis, name.replace('_', ' + '), {'T': 'tokens', 'K': 'entries of a key'}[x], 'milliseconds')
    axis = axes['bars']
    axis.barh(list(bars), list(bars.values()), color=[style(x, names)['color'] if x in names else 'silver' for x in bars])
    for i, value in enumerate(bars.values()):
        axis.text(value, i, f' {value:.2f}', va='center', fontsize=7)
    axis.invert_yaxis()
    axis.set_title(f"forward + backward, as a multiple of chunk_longhorn's time\n{shape}", fontsize=10)
    axis.tick_params(axis='y', labelsize=7)
    if bars:
        axis.set_xscale('log')
    axis.spines[['top', 'right']].set_visible(False)
    labelled = next((axes[f'{n} {x}'] for (n, x), group in lines.items() if group), None)
    if labelled is not None:
        handles, labels = labelled.get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=7, frameon=False, ncols=5, loc='outside lower center')
    figure.suptitle(describe(report), fontsize=10)
    figure.savefig(path)


def draw_models(report: dict, path: str) -> None:
    """Training tokens a second, time of a generated token and bytes of its cache against the prompt's length."""
    rows = [row for row in report['rows'] if row['status'] == 'ok']
    names = [row['model'] for row in rows]
    figure = Figure(figsize=(15, 4.5), dpi=100, layout='constrained')
    training, token, state = figure.subplots(1, 3)
    training.barh(names, [row['training']['tokens_per_s'] for row in rows], color=[style(x, names)['color'] for x in names])
    training.invert_yaxis()
    training.set(title='training', xlabel='tokens a second')
    training.tick_params(axis='y', labelsize=8)
    training.spines[['top', 'right']].set_visible(False)
    plot_lines(token, {row['model']: [(x['prompt'], x['token']) for x in row['generation']] for row in rows}, names)
    finish(token, 'generation: time', 'tokens of the prompt', 'milliseconds a token')
    for row in rows:
        xs, ys = [x['prompt'] for x in row['generation']], [x['state_bytes'] for x in row['generation']]
        state.plot(xs, ys, **style(row['model'], names))
    finish(state, 'generation: cache', 'tokens of the prompt', 'bytes')
    if rows:
        state.legend(fontsize=7, frameon=False)
    figure.suptitle(describe(report), fontsize=10)
    figure.savefig(path)
