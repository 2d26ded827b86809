"""The results page's section of predicted times."""

from __future__ import annotations

from benchmarks.report.tables import measured_on, place, table

PASSES = {
    'diagonal_fwd': 'diagonal forward', 'diagonal_bwd': 'diagonal backward', 'exact_fwd': 'exact forward',
    'exact_bwd': 'exact backward',
}
PEERS = ('chunk_gla', 'chunk_delta_rule', 'chunk_kda')
GATES = {
    'exact': 'exact', 'exact, gate per channel': 'exact_channel_gate', 'exact, gate per head': 'exact_head_gate',
    'diagonal': 'diagonal', 'diagonal, gate per channel': 'diagonal_channel_gate',
    'diagonal, gate per head': 'diagonal_head_gate', '`chunk_gated_delta_rule`': 'chunk_gated_delta_rule',
    '`chunk_kda`': 'chunk_kda',
}
GATED = """## A gate, predicted

**Predicted: these are not measurements.** As above, with a float32 decay for each channel or head and its gradient. The bytes
are those that all kernels of a pass move."""
INTRODUCTION = """## Times predicted without a GPU

**Predicted: these are not measurements.** `python -m benchmarks predict` compiles the launches that a call makes, reads the
machine code and simulates one multiprocessor. Milliseconds on an {gpu} for {shape}, one head, bfloat16; Longhorn as
the layer calls it, with gate, skip and logits of beta, fla's operators without. "of the floor" is a multiple of what any
implementation needs for its bytes or for the best known algorithm's instructions. Commit {commit}.

± says within what nine of ten published timings of kernels like it are predicted ([below](#how-far-predicted-times-are-off)):
{bars}.

**No ± where an innermost loop has more than 768 instructions**, as in all Longhorn passes but the diagonal forward up to K =
64: the simulation has no instruction cache, and on an H200 such passes took 1.2 to 2.2 times the prediction."""
MEASURED = """## Passes measured on {place}

As `python -m benchmarks gpu --stages passes`, eager. {machine} {shape}, one head, bfloat16; Longhorn as
the layer calls it, with z, D and logits of beta, `chunk_delta_rule` without.

The diagonal form took {ratios} times the exact form's time, forward and backward.

**Both rows of `chunk_delta_rule` are launch-bound**: what was timed is how long PyTorch takes to launch its kernels, so they
can't be compared with Longhorn's rows, which are times of the GPU (the exact forward at K = 16 may wait for its launches too).
On an H200 its kernels are predicted to take 0.23 and 0.54 ms, half of the exact form's measured time.

The predictions are of an H100 and of code by Triton {triton}. Longhorn's are too low where an innermost loop has more than 768
instructions, by 1.2 to 2.2 times: most likely the loops don't fit a scheduler's instruction cache, which the simulation does
not have. Error bars are withdrawn there. The diagonal forward's loops have 779 (K = 16) and 761 instructions; at K = 16 Triton
3.6's code is predicted to take 1.43 times as long as 3.9's."""
KINDS = {'chunks': 'of matrix products of chunks', 'recurrences': 'of recurrences, which the diagonal form is'}


LAYERS = """## A training step and a token of a layer, predicted

**Predicted: these are not measurements.** `python -m benchmarks layers`: norm, layer and residual in bfloat16 on an {gpu}, all
their kernels. Those by Triton are simulated (nine of ten published timings within {bars}). Matrix
products take 780 TFLOPS or their bytes, PyTorch's other kernels their bytes, and each launch 1.5 us. Longhorn has K = 16,
fla's layers their defaults with heads as in their papers. Nothing is fused by a compiler. The last column is one token
through as many of each layer as Longhorn's model has. **Longhorn's steps are too low**, by what its kernels are (1.2 to 1.8
times in the exact form, 1.8 to 2.2 in the diagonal backward on an H200): they rank nothing.
{mamba}
{shapes}"""
MAMBA = """
Mamba and Mamba-2 are fla's layers with the Triton kernels of mamba_ssm {version}. Their convolution is fla's in Triton, as for
the others, in place of causal_conv1d's in CUDA. Mamba's scan is CUDA, too: it counts with the least time for its bytes or its
source's instructions, so its step is a lower bound, marked ≥ ({bounds}).
"""


def has_bar(row: dict) -> bool:
    """The error bars are of kernels with short loops: of Longhorn's, the diagonal forward up to K = 64."""
    return row['pass'].startswith('chunk_') or (row['pass'] == 'diagonal_fwd' and row['K'] <= 64)


def time_of(row: dict | None) -> str:
    if not row:
        return ''
    return f'{row["ms"]:.2f} ± {row["within"]:.0%}' if has_bar(row) else f'{row["ms"]:.2f}'


def predicted(report: dict) -> str:
    """The first GPU and shape of the file: our passes, and fla's operators in the same direction beside them."""
    first = {name: report['rows'][0][name] for name in ('gpu', 'B', 'T', 'V')}
    rows = {(row['pass'], row['K']): row for row in report['rows'] if 'ms' in row and first.items() <= row.items()}
    lines = []
    for K in dict.fromkeys(K for _, K in rows):
        for name in (name for name in PASSES if (name, K) in rows):
            row, peers = rows[name, K], [rows.get((f'{peer}_{name.split("_")[1]}', K)) for peer in PEERS]
            lines.append([PASSES[name], K, time_of(row), f'{row["ratio"]:.1f}', *map(time_of, peers)])
    gpu, *sizes = first.values()
    shape = '`' + ' '.join(f'{name}={x}' for name, x in zip('BTV', sizes, strict=True)) + '`'
    bars = {row['like']: f'{row["points"]} timings {KINDS[row["like"]]}' for row in rows.values()}
    text = INTRODUCTION.format(gpu=gpu, shape=shape, commit=report['machine']['commit'], bars=', '.join(bars.values()))
    return text + '\n\n' + table(['pass', 'K', 'ms', 'of the floor', *(f'`{peer}`' for peer in PEERS)], lines)


def gates(report: dict) -> str:
    """Forward and backward of each update by gate, and fla's gated operators, by K: times, and bytes of all that is moved."""
    first = {name: report['rows'][0][name] for name in ('gpu', 'B', 'T', 'V')}
    rows = {(row['pass'], row['K']): row for row in report['rows'] if 'ms' in row and first.items() <= row.items()}
    lines = []
    for name, stem in GATES.items():
        for K in sorted({K for key, K in rows if key == f'{stem}_fwd'}):
            both = [rows[f'{stem}_{direction}', K] for direction in ('fwd', 'bwd')]
            lines.append([name, K, *map(time_of, both), f'{sum(row["ms"] for row in both):.2f}',
                          ' + '.join(f'{row["bytes"]:.1f}' for row in both)])
    columns = ['operator', 'K', 'forward, ms', 'backward, ms', 'both', 'bytes a token and channel']
    return GATED + '\n\n' + table(columns, lines)


def passes(measured: dict, predicted: dict) -> str:
    """What was measured, and what is predicted for the same passes on the GPU of the file of predictions."""
    key = ('B', 'T', 'V', 'K', 'pass')
    gpu, lines = predicted['rows'][0]['gpu'], []
    ours = {tuple(row[x] for x in key): row for row in predicted['rows'] if 'ms' in row and row['gpu'] == gpu}
    for row in measured['rows']:
        other, spread = ours[tuple(row[x] for x in key)], f'{row["ms_low"]:.2f} to {row["ms_high"]:.2f}'
        name = PASSES.get(row['pass'], f'`{row["pass"]}`, launch-bound')
        ratio = f'{row["ms"] / other["ms"]:.2f}' if row['pass'] in PASSES else ''
        lines.append([name, row['K'], f'{row["ms"]:.2f} ({spread})', time_of(other), ratio])
    shape = '`' + ' '.join(f'{name}={measured["rows"][0][name]}' for name in 'BTV') + '`'
    both = {(row['pass'][:-4], row['K']): 0.0 for row in measured['rows']}
    for row in measured['rows']:
        both[row['pass'][:-4], row['K']] += row['ms']
    ratios = ' and '.join(f'{both["diagonal", K] / both["exact", K]:.1f} (K = {K})' for K in (16, 64))
    text = MEASURED.format(
        shape=shape, ratios=ratios, place=place(measured), machine=measured_on(measured['machine']),
        triton=predicted['machine']['versions']['triton'],
    )
    missing = '; '.join(f'{name}: {reason}' for name, reason in measured['not_run'].items())
    columns = ['pass', 'K', 'measured, ms (quartiles)', f'predicted, ms ({gpu})', 'measured / predicted']
    return f'{text}\n\n{table(columns, lines)}\n\nNot measured: {missing}.'


def layers(report: dict) -> str:
    """Each model's layers: a step in milliseconds, a token in microseconds, and their parts."""
    rows = {(row['model'], row['layer'], row['pass']): row for row in report['rows']}
    lines, bounds = [], []
    for model, name in dict.fromkeys((model, name) for model, name, _ in rows if 'recompute' not in name):
        step, token = (rows.get((model, name, what)) for what in ('step', 'token'))
        line = [model, name, f'{(step or token)["parameters"] / 1e6:.1f}', *([''] * 5)]
        if step:
            line[3:6] = [f'{step[part] / 1e3:.2f}' if step[part] else '' for part in ('us', 'ours_us', 'products_us')]
            if step['bounds_us']:
                line[3] = f'≥ {line[3]}'
                bounds.append(f'{step["bounds_us"] / 1e3:.2f} ms of it at {model}')
        if token:
            line[6:] = [f'{token["us"]:.0f}', f'{token["us"] * token["layers"] / 1e3:.2f}']
        lines.append(line)
    bars = ', '.join(f'{bar["within"]:.0%} for {kind}' for kind, bar in report['bars'].items())
    shapes = '\n'.join(dict.fromkeys(
        f'- {row["model"]}: {row["layers"]} layers of width {row["width"]}, a step of {row["B"]} x {row["T"]} tokens, '
        f'a token of each of {row["sequences"]} sequences' for row in report['rows']
    ))
    mamba = MAMBA.format(version=report['machine']['versions']['mamba-ssm'], bounds=', '.join(bounds)) if bounds else ''
    text = LAYERS.format(gpu=report['rows'][0]['gpu'], shapes=shapes, bars=bars, mamba=mamba)
    columns = ['model', 'layer', 'parameters, M', 'step, ms', "Longhorn's kernels", 'products', 'token, us', 'all layers, ms']
    return '\n\n'.join([text, table(columns, lines)])
