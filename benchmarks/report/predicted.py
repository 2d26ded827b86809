"""The results page's sections on passes measured on a GPU, and on predicted times."""

from __future__ import annotations

from benchmarks.report.tables import measured_on, place, table

PASSES = {
    'diagonal_fwd': 'diagonal forward', 'diagonal_bwd': 'diagonal backward', 'exact_fwd': 'exact forward',
    'exact_bwd': 'exact backward',
}
PEERS = ('chunk_gla', 'chunk_delta_rule', 'chunk_kda')
MEASURED = """## Passes measured on {place}

`python -m benchmarks passes`. {machine} {shape}, one head, bfloat16; Longhorn as the layer calls it, with z, D and
logits of beta, `chunk_delta_rule` without.

The diagonal form took {ratios} times the exact form's time, forward and backward.

**Both rows of `chunk_delta_rule` are launch-bound**: what was timed is how long PyTorch takes to launch its kernels, so they
can't be compared with Longhorn's rows, which are times of the GPU (the exact forward at K = 16 may wait for its launches too).

The predictions are of this GPU and of this commit's code by Triton {triton}. The constants of the instruction cache were set
by these rows: fitted to those of one K, they are off by {held_out} for the passes of the other."""
INTRODUCTION = """## Times predicted without a GPU

**Predicted: these are not measurements.** `python -m benchmarks predict` compiles the launches that a call makes, reads the
machine code and simulates one multiprocessor. Milliseconds on an {gpu} for {shape}, one head, bfloat16, by Triton {triton};
Longhorn as the layer calls it, with z, D and logits of beta, fla's operators without. Commit {commit}.

± says within what nine of ten timed calls with loops as long are predicted ([below](#how-far-predicted-times-are-off))."""
CALIBRATED = """## How far predicted times are off

`python -m benchmarks calibrate`. {points} timings that others published on an H100
([sources](../packages/offgpu/offgpu/calibration/README.md)) beside what is predicted for the same calls. Constants of the
model were set by the points called fitted alone. Made with {versions}; commit {commit}.

Error bars: {bars}."""


def time_of(row: dict | None) -> str:
    return f'{row["ms"]:.2f}' + (f' ± {row["within"]:.0%}' if 'within' in row else '') if row else ''


def shape_of(row: dict) -> str:
    return '`' + ' '.join(f'{name}={row[name]}' for name in 'BTV') + '`'


def longest(row: dict) -> int:
    return max((x for kernel in row['kernels'] for x in kernel['loops']), default=0)


def passes(measured: dict) -> str:
    """What was measured, and what is predicted for the code that ran."""
    lines, both = [], {}
    for row in measured['rows']:
        own, spread = row['pass'] in PASSES, f'{row["ms_low"]:.2f} to {row["ms_high"]:.2f}'
        name = PASSES[row['pass']] if own else f'`{row["pass"]}`, launch-bound'
        lines.append([
            name, row['K'], row['longest_loop'], f'{row["ms"]:.2f} ({spread})', f'{row["predicted_ms"]:.2f}',
            f'{row["ms"] / row["predicted_ms"]:.2f}' if own else '', f'{row["without_fetch_ms"]:.2f}',
        ])
        both[row['pass'][:-4], row['K']] = both.get((row['pass'][:-4], row['K']), 0.0) + row['ms']
    text = MEASURED.format(
        shape=shape_of(measured['rows'][0]), place=place(measured), machine=measured_on(measured['machine']),
        ratios=' and '.join(f'{both["diagonal", K] / both["exact", K]:.1f} (K = {K})' for K in (16, 64)),
        triton=measured['machine']['versions']['triton'], held_out=measured['held_out'],
    )
    missing = '; '.join(f'{name}: {reason}' for name, reason in measured['not_run'].items())
    columns = ['pass', 'K', 'longest loop', 'measured, ms (quartiles)', 'predicted, ms', 'measured / predicted',
               'predicted without an instruction cache, ms']
    return f'{text}\n\n{table(columns, lines)}\n\nNot measured: {missing}.'


def predicted(report: dict) -> str:
    """Our passes, and fla's operators in the same direction beside them."""
    rows = {(row['pass'], row['K']): row for row in report['rows']}
    lines = []
    for K in dict.fromkeys(K for _, K in rows):
        for name in (name for name in PASSES if (name, K) in rows):
            row, peers = rows[name, K], [rows.get((f'{peer}_{name.split("_")[1]}', K)) for peer in PEERS]
            lines.append([PASSES[name], K, longest(row), time_of(row), *map(time_of, peers)])
    first = report['rows'][0]
    text = INTRODUCTION.format(
        gpu=first['gpu'], shape=shape_of(first), triton=first['triton'], commit=report['machine']['commit'],
    )
    return text + '\n\n' + table(['pass', 'K', 'longest loop', 'ms', *(f'`{peer}`' for peer in PEERS)], lines)


def calibrated(report: dict, measured: dict) -> str:
    """Errors of each group of points and of each operator."""
    from offgpu.calibration.errors import error_bars
    lines = [
        [name, e['points'], f'{e["geometric_mean"]:.2f}', *(f'{e[part]:.0%}' for part in ('median', 'nine_of_ten', 'largest'))]
        for name, e in report['errors'].items()
    ]
    machine = report['machine']
    versions = sorted({row['made_with'] for row in report['rows']}) + [f'triton {machine["versions"]["triton"]}']
    bars = error_bars(report['rows'] + measured['rows'])
    text = CALIBRATED.format(
        points=len(report['rows']), versions=', '.join(versions), commit=machine['commit'],
        bars=', '.join(f'{x["within"]:.0%} for loops {name} instructions ({x["points"]} timings)' for name, x in bars.items()),
    )
    return text + '\n\n' + table(
        ['points', 'number', 'predicted / measured', 'median error', 'nine of ten within', 'largest'], lines,
    )
