"""The page on compiled kernels by card, `docs/cards.md`."""

from __future__ import annotations

from benchmarks.report.tables import measured_on, table

CARDS = {
    'sm_80': 'A100', 'sm_86': 'RTX 30', 'sm_89': 'RTX 40, L40', 'sm_90': 'H100, H200', 'sm_100': 'B200', 'sm_120': 'RTX 50',
    'gfx942': 'MI300',
}
HEADER = """# Kernels by card

What Triton makes of the kernels of a training step, in bfloat16: B = {B}, T = {T}, one head of V = {V}, called as the
layer does. `python -m benchmarks kernels --json benchmarks/results/kernels.json` compiles them without a GPU, and
`python -m benchmarks report` writes this page. Nothing here was run on a GPU.

A cell has the shared memory of a block in KiB, spills, and the seconds of a processor that compiling takes. Spills are the
instructions that store or load spilled registers; on AMD, the spilled registers. Where a kernel is launched in several forms,
these are the most that one requires, and the seconds of all. Other programs ran on the same machine: differences of a third
between seconds mean little.

A first training step compiles one kernel after the other: the seconds of an update's last table.
[`python -m fla_longhorn.selfcheck --compile-only`](evaluate.md#compile-the-kernels-before-a-job) does it beforehand, in
several processes. Nine tenths of the time of `longhorn_bwd_kernel` (K = 16, sm_90, `MLIR_ENABLE_TIMING=1`) go to one pass of
Triton, TritonGPUCoalesce, which visits for each access to memory all operations that it depends on or that depend on it. The
kernel has many of both, because it unrolls four tokens; with fewer its sums over channels would not fill the tensor cores'
tiles.

On GPUs before Ampere, such as the T4 (sm_75), a `ValueError` says that there are no kernels, and where a launch requires more
memory than a card has on chip, how much.

{machine}
"""


def cell(row: dict) -> str:
    return f'{row["shared"] / 1024:.1f} / {row["spills"]} / {row["seconds"]:.1f}'


def in_words(error: str) -> str:
    """Of a `ValueError`: without the launches before it and Triton's own error."""
    return error.partition(']: ')[2].partition(' out of resource')[0]


def cards_page(report: dict) -> str:
    rows, sizes = report['rows'], {x: report[x] for x in 'BTV'}
    parts = [HEADER.format(machine=measured_on(report['machine']), **sizes)]
    targets = [x for x in CARDS if any(row['target'] == x for row in rows)]
    columns = [f'{x} ({CARDS[x]})' for x in targets]
    for update in ('diagonal', 'exact'):
        parts.append(f'## {update.capitalize()} update\n')
        own = [row for row in rows if row['update'] == update]
        state_sizes = sorted({row['K'] for row in own})
        for kernel in dict.fromkeys(row['kernel'] for row in own if 'kernel' in row):
            cells = {(row['K'], row['target']): cell(row) for row in own if row.get('kernel') == kernel}
            lines = [[K, *(cells.get((K, x), '') for x in targets)] for K in state_sizes]
            parts.append(f'`{kernel}`: KiB / spills / seconds\n\n{table(["K", *columns], lines)}\n')
        lines = []
        for K in state_sizes:
            seconds = [sum(row.get('seconds', 0) for row in own if (row['K'], row['target']) == (K, x)) for x in targets]
            lines.append([K, *(f'{x:.0f}' if x else '' for x in seconds)])
        parts.append(f'All kernels: seconds\n\n{table(["K", *columns], lines)}\n')
    failed = [row for row in rows if 'error' in row]
    if failed:
        lines = [f'- {row["target"]}, {row["update"]}, K = {row["K"]}: {in_words(row["error"])}' for row in failed]
        parts.append('## Not compiled\n\n' + '\n'.join(lines) + '\n')
    return '\n'.join(parts)
