"""The results page's section of predicted times."""

from __future__ import annotations

from benchmarks.report.tables import table

PASSES = {
    'diagonal_fwd': 'diagonal forward', 'diagonal_bwd': 'diagonal backward', 'exact_fwd': 'exact forward',
    'exact_bwd': 'exact backward',
}
PEERS = ('chunk_gla', 'chunk_delta_rule', 'chunk_kda')
INTRODUCTION = """## Times predicted without a GPU

**Predicted, uncalibrated: these are not measurements.** `python -m benchmarks predict` compiles the launches that a call
makes, reads the machine code and simulates one multiprocessor; the constants are published ones. Its ratios say more than its
times. All in bfloat16; Longhorn as the layer calls it, with gate (`z`), skip (`D`) and logits of beta."""
FLOORS = """"Floor" is the larger of two: the bytes that any implementation moves (each input and output once, the saved
states once) at the memory's bandwidth, and the instructions of the best algorithm known (`benchmarks/predict/floors.py`).
"bytes" are those of one token and channel: moved and needed. "before" is commit {commit}."""
DIRECTIONS = {'fwd': 'forward', 'bwd': 'backward'}
PEERS_INTRODUCTION = """fla's operators on as many tokens and channels, one head, without gate and skip, each kernel with the
better of two of its configurations; the backward is what autograd launches, with what it computes again. The ratios are to our
times in the tables above, with gate and skip:"""
BOUNDS_INTRODUCTION = """**bounds from below, not times.** The latencies of a B200 and the rates of its new instructions are
not published, so nothing is simulated. The floors are as above, but at the peaks of NVIDIA's data sheets (8 TB/s, 1.98 GHz),
and a packed instruction counts as two; "our instructions" are those that our kernels, compiled for sm_100, issue, with no
scheduler ever idle:"""


def key(row: dict) -> tuple:
    return tuple(row[name] for name in ('gpu', 'pass', 'B', 'T', 'V', 'K'))


def largest_causes(row: dict) -> str:
    return ', '.join(f'{name} {share:.0%}' for name, share in row['causes'])


def shape_of(row: dict) -> str:
    return f'{row["gpu"]}, `B={row["B"]} T={row["T"]} V={row["V"]}`'


def own_passes(rows: list[dict], before: dict[tuple, dict]) -> list[str]:
    """A table for each GPU and shape."""
    parts = []
    for shape in dict.fromkeys(shape_of(row) for row in rows):
        lines = []
        for row in rows:
            if shape_of(row) == shape:
                old = before.get(key(row))
                lines.append([
                    PASSES[row['pass']], row['K'], f'{old["ms"]:.2f}' if old else '', f'{row["ms"]:.2f}',
                    f'{row["dram_floor_ms"]:.2f}', f'{row["issue_floor_ms"]:.2f}', f'{row["ratio"]:.1f}',
                    f'{row["bytes"]:.1f} / {row["bytes_needed"]:.1f}', largest_causes(row),
                ])
        columns = [
            'pass', 'K', 'before, ms', 'ms', 'bytes floor, ms', 'instruction floor, ms', 'of the floor', 'bytes',
            'what schedulers spent cycles on',
        ]
        parts.append(f'{shape}:\n\n{table(columns, lines)}\n')
    return parts


def peers(rows: list[dict]) -> str:
    """fla's operators beside ours: a ratio above 1 is slower than our diagonal or exact pass."""
    times = {key(row): row['ms'] for row in rows}
    lines = []
    for row in rows:
        name, _, direction = row['pass'].rpartition('_')
        if name not in PEERS:
            continue
        ours = [times[row['gpu'], f'{update}_{direction}', *key(row)[2:]] for update in ('diagonal', 'exact')]
        lines.append((PEERS.index(name), row['K'], direction == 'bwd', [
            f'`{name}`', DIRECTIONS[direction], row['K'], f'{row["ms"]:.2f}', *(f'{row["ms"] / ms:.2f}' for ms in ours),
            f'{row["bytes"]:.1f}', largest_causes(row),
        ]))
    columns = [
        'operator', 'pass', 'K', 'ms', 'of our diagonal', 'of our exact', 'bytes', 'what schedulers spent cycles on',
    ]
    return f'{PEERS_INTRODUCTION}\n\n' + table(columns, [cells for *_, cells in sorted(lines)])


def bounds(rows: list[dict]) -> str:
    """Passes on GPUs whose latencies are not known."""
    lines = [[
        PASSES[row['pass']], row['K'], f'{row["dram_floor_ms"]:.2f}', f'{row["issue_floor_ms"]:.2f}', f'{row["issue_ms"]:.2f}',
        f'{row["instructions"]:.0f} / {row["instructions_needed"]:.0f}', sum(k['spills'] for k in row['kernels']),
    ] for row in sorted(rows, key=lambda row: (row['K'], [*PASSES].index(row['pass'])))]
    columns = [
        'pass', 'K', 'bytes floor, ms', 'instruction floor, ms', 'our instructions, ms', 'instructions: ours / needed',
        'spills',
    ]
    return f'{shape_of(rows[0])}: {BOUNDS_INTRODUCTION}\n\n' + table(columns, lines)


def scan_bounds(bounds: list[dict]) -> str:
    lines = [[row['K'], f'{row["dram_ms"]:.2f}', f'{row["issue_ms"]:.2f}'] for row in bounds]
    return ('Mamba-1\'s CUDA scan, forward, N = K: **a bound from the arithmetic of its source**, not a simulation; the real '
            'kernel takes longer:\n\n' + table(['N', 'bytes, ms', 'instructions, ms'], lines))


def predicted(report: dict, old: dict) -> str:
    timed = [row for row in report['rows'] if 'ms' in row]
    bounded = [row for row in report['rows'] if 'ms' not in row]
    before = {key(row): row for row in old['rows']}
    parts = [f'{INTRODUCTION} Commit {report["machine"]["commit"]}.\n', FLOORS.format(commit=old['commit']) + '\n']
    parts += own_passes([row for row in timed if row['pass'] in PASSES], before)
    if bounded:
        parts.append(bounds(bounded) + '\n')
    if any(row['pass'].rpartition('_')[0] in PEERS for row in timed):
        parts.append(peers(timed) + '\n')
    parts.append(scan_bounds(report['scan_bounds']))
    return '\n'.join(parts)
