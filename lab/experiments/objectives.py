"""Compares the updates of the paper's Table 4 (arXiv 2407.14207) with the numerical minimisers of their objectives.

    python -m lab.experiments objectives [--json FILE] [--plot FILE.png]

Prints the tables of `lab/notebook/objectives.md`. A distance is `|S - S*| / |S*|` with the minimiser S*, computed
from the objective alone in float64; the table's rows are in `lab/experiments/table4.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from statistics import median, quantiles
from textwrap import fill

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.measure.machine import describe_machine
from benchmarks.measure.timing import write_report
from benchmarks.report.plots import MOST, finish, label_ends
from benchmarks.report.tables import measured_on, table
from fla_longhorn.ops import naive_recurrent_longhorn
from lab.experiments.table4 import TABLE, VARIANTS, Row, Token, longhorn, minimiser, op_longhorn

SEED = 2407
# entries of a key, and beta |k|^2, which sets how much of a channel's error a step corrects
SIZES, STRENGTHS = (1, 2, 4, 8, 16, 32, 64, 128), (0.1, 1.0, 10.0, 100.0)
NO_NUMBER = 'no number: the sum is missing'
REPEATS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def random_keys(*shape: int, norm2: float, generator: torch.Generator) -> torch.Tensor:
    """Gaussian directions with `|k|^2 = norm2`."""
    k = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return k * (norm2 ** 0.5 / k.norm(dim=-1, keepdim=True))


def random_tokens(T: int, K: int, V: int, norm2: float, generator: torch.Generator) -> list[Token]:
    """Gates between 0.05 and 0.95, Gaussian inputs."""
    def gate(*shape: int) -> torch.Tensor:
        return 0.05 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)

    return [
        Token(random_keys(K, norm2=norm2, generator=generator), torch.randn(V, generator=generator, dtype=torch.float64),
              gate(V), gate(), gate(K), gate(V), gate(V))
        for _ in range(T)
    ]


def distance(S: torch.Tensor, other: torch.Tensor) -> float:
    return ((S - other).norm() / other.norm()).item()


def missed(objective: Callable, S: torch.Tensor, best: torch.Tensor, P: torch.Tensor, token: Token) -> float:
    """Share of the decrease from P to the minimiser that S misses: 0 solves the problem, 1 is no better than P."""
    values = [objective(x, P, token).item() for x in (S, best, P)]
    return (values[0] - values[1]) / (values[2] - values[1])


def follow(row: Row, tokens: list[Token], P: torch.Tensor) -> dict:
    """The deviations of a row along a sequence, each step from the op's previous state.

    `printed` holds those from the objective as printed: None if that is not a number.
    """
    updates, ops, gaps, printed = [], [], [], []
    for token in tokens:
        best, S, run = minimiser(row.objective, P, token), row.update(P, token), row.op(P, token).to(P.dtype)
        updates.append(distance(S, best))
        ops.append(distance(run, best))
        gaps.append(missed(row.objective, S, best, P, token))
        if row.printed:
            best = minimiser(row.printed, P, token)
            printed.append((distance(S, best), missed(row.printed, S, best, P, token)))
        P = run
    return {
        'model': row.name, 'op': row.op_name, 'update_distance': spread(updates), 'op_distance': spread(ops),
        'missed': spread(gaps),
        'printed': {'update_distance': spread([x for x, _ in printed]), 'missed': spread([x for _, x in printed])}
        if printed else None,
    }


def spread(values: list[float]) -> dict:
    """Median, quartiles and the largest."""
    low, _, high = quantiles(values, n=4, method='inclusive')
    return {'median': median(values), 'low': low, 'high': high, 'largest': max(values)}


def measure_rows(rows: tuple[Row, ...], T: int = 64, K: int = 16, V: int = 8) -> list[dict]:
    """Each row over T tokens from a random state: beta |k|^2 is below 0.95, so that the minus sign has a minimiser too."""
    results = []
    for row in rows:
        generator = torch.Generator().manual_seed(SEED)
        size = 1 if 'Griffin' in row.name else K
        tokens = random_tokens(T, size, V, 1.0, generator)
        results.append(follow(row, tokens, torch.randn(size, V, generator=generator, dtype=torch.float64)))
    return results


def measure_diagonal(K: int, strength: float, N: int = 128, T: int = 256, V: int = 2, beta: float = 0.5) -> dict:
    """The diagonal update against the minimiser after T tokens, in N sequences from zero, with `beta |k|^2 = strength`.

    Beside the deviations of one step:
    of_step: the distance as a share of the minimiser's step, `|S - S*| / |S* - P|`;
    erased: what the step removes of the old recall `k^T S_{t-1}`, as a share of what the minimiser removes, by least squares;
    recall_error: `|S_t^T k - x| / |x|` before and after the step, over all sequences;
    apart: distance of the two updates' states after T tokens of their own.
    """
    generator = torch.Generator().manual_seed(SEED)
    k = random_keys(N, T + 1, 1, K, norm2=strength / beta, generator=generator)
    x = torch.randn(N, T + 1, 1, V, generator=generator, dtype=torch.float64)
    betas = torch.full_like(x, beta)

    def run(tokens: slice, state: torch.Tensor | None, exact: bool, x: torch.Tensor = x) -> torch.Tensor:
        tensors = (y[:, tokens] for y in (k, k, x, betas))
        return naive_recurrent_longhorn(*tensors, exact=exact, initial_state=state, output_final_state=True)[1]

    first, last = slice(0, T), slice(T, None)
    P, exact = run(first, None, False), run(first, None, True)
    S = run(last, P, False)
    one_gate = torch.ones((), dtype=torch.float64)
    tokens = [Token(k[n, T, 0], x[n, T, 0], betas[n, T, 0], one_gate, one_gate, one_gate, one_gate) for n in range(N)]
    best = torch.stack([minimiser(longhorn, P[n, 0], tokens[n]) for n in range(N)])[:, None]

    def recall(state: torch.Tensor) -> torch.Tensor:
        return torch.einsum('nk,nkv->nv', k[:, T, 0], state[:, 0])

    old = recall(P)
    kept = [recall(run(last, P, exact, torch.zeros_like(x))) for exact in (False, True)]
    removed, removed_exactly = ((old * (old - y)).sum().item() for y in kept)
    target = x[:, T, 0]
    return {
        'K': K, 'beta_k2': strength,
        'distance': spread([distance(S[n], best[n]) for n in range(N)]),
        'of_step': spread([((S[n] - best[n]).norm() / (best[n] - P[n]).norm()).item() for n in range(N)]),
        'missed': spread([missed(longhorn, S[n, 0], best[n, 0], P[n, 0], tokens[n]) for n in range(N)]),
        'erased': removed / removed_exactly,
        'recall_error': {
            name: distance(recall(state), target) for name, state in (('before', P), ('diagonal', S), ('minimiser', best))
        },
        'apart': spread([distance(y, z) for y, z in zip(P, exact, strict=True)]),
    }


def measure_agreement(K: int = 16, V: int = 8, T: int = 64) -> list[dict]:
    """Cases where the diagonal update is the minimiser: the largest distance over T tokens with random states."""
    generator = torch.Generator().manual_seed(SEED)
    zero = torch.zeros(K, V, dtype=torch.float64)
    results = {}
    for name, size in (('K = 1', 1), ('keys with one entry that is not 0', K), ('a zero state', K)):
        distances = []
        for token in random_tokens(T, size, V, 4.0, generator):
            P = torch.randn(size, V, generator=generator, dtype=torch.float64)
            if name == 'a zero state':
                P = zero
            elif size > 1:
                chosen = torch.randint(size, (), generator=generator)
                token = replace(token, k=2 * torch.eye(size, dtype=torch.float64)[chosen])
            distances.append(distance(op_longhorn(P, token), minimiser(longhorn, P, token)))
        results[name] = max(distances)
    return [{'case': name, 'distance': value} for name, value in results.items()]


def measure_repeats(K: int, beta: float = 0.5, strength: float = 1.0) -> list[dict]:
    """One pair, written repeatedly from a zero state: the recall as a multiple of the input.

    All entries of the key are the same; `beta |k|^2 = strength`.
    """
    T = max(REPEATS)
    k = torch.full((1, T, 1, K), (strength / beta / K) ** 0.5, dtype=torch.float64)
    x = torch.ones(1, T, 1, 1, dtype=torch.float64)
    recalls = [naive_recurrent_longhorn(k, k, x, beta * x, exact=exact)[0].flatten().tolist() for exact in (False, True)]
    return [{'K': K, 'repeats': n, 'diagonal': recalls[0][n - 1], 'exact': recalls[1][n - 1]} for n in REPEATS]


def measure(sizes: tuple[int, ...] = SIZES, strengths: tuple[float, ...] = STRENGTHS, **options) -> dict:
    return {
        'machine': describe_machine(), 'seed': SEED, 'dtype': 'float64',
        'table': measure_rows(TABLE), 'variants': measure_rows(VARIANTS),
        'diagonal': [measure_diagonal(K, strength, **options) for K in sizes for strength in strengths],
        'agreement': measure_agreement(),
        'repeats': [row for K in sizes for row in measure_repeats(K)],
    }


def number(x: float) -> str:
    """Two digits; rounding errors of float64 zeros are printed as a bound."""
    return '< 1e-14' if abs(x) < 1e-14 else f'{x:.1e}' if abs(x) < 1e-3 else f'{x:.2g}' if abs(x) < 100 else f'{x:.0f}'


def ranged(figures: dict) -> str:
    """Median (lower to upper quartile), or the largest value if that is rounding."""
    if figures['largest'] < 1e-5:
        return number(figures['largest'])
    return f'{number(figures["median"])} ({number(figures["low"])} to {number(figures["high"])})'


def tables(report: dict) -> dict[str, str]:
    """The page's tables and its summary, by name."""
    code = ["the field's code", 'its distance']
    columns = ['', 'distance, as printed', 'decrease missed, as printed', 'distance, as it should be', *code]
    result = {'table': table(columns, [
        [row['model'], *(ranged(row['printed'][x]) if row['printed'] else NO_NUMBER for x in ('update_distance', 'missed')),
         *(ranged(row['update_distance']), row['op'], ranged(row['op_distance']))] for row in report['table']
    ])}
    result['variants'] = table(['', 'distance of the formula', 'decrease missed', *code], [
        [row['model'], *(ranged(row[x]) for x in ('update_distance', 'missed')), row['op'], ranged(row['op_distance'])]
        for row in report['variants']
    ])
    cells = {(row['K'], row['beta_k2']): row for row in report['diagonal']}
    sizes, strengths = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))

    def grid(cell: Callable[[dict], str]) -> str:
        rows = [[f'{strength:g}', *(cell(cells[K, strength]) for K in sizes)] for strength in strengths]
        return table(['β\\|k\\|²', *(f'K = {K}' for K in sizes)], rows)

    for name in ('distance', 'of_step', 'missed', 'apart'):
        result[name] = grid(lambda row, name=name: number(row[name]['median']))
    result['erased'] = grid(lambda row: number(row['erased']))
    result['recall_error'] = grid(lambda row: ' / '.join(f'{x:.2f}' for x in row['recall_error'].values()))
    result['agreement'] = table(
        ['', 'largest distance'], [[row['case'], number(row['distance'])] for row in report['agreement']],
    )
    repeats = {(row['K'], row['repeats']): row for row in report['repeats']}
    rows = [[f'diagonal, K = {K}', *(f'{repeats[K, n]["diagonal"]:.2f}' for n in REPEATS)] for K in sizes]
    rows.append(['exact, any K', *(f'{repeats[sizes[-1], n]["exact"]:.2f}' for n in REPEATS)])
    result['repeats'] = table(['times written', *map(str, REPEATS)], rows)
    result['summary'] = summary(report['table'], cells.get((16, 1.0), report['diagonal'][-1]))
    result['machine'] = measured_on(report['machine'])
    return result


def summary(rows: list[dict], cell: dict) -> str:
    """Which updates minimise the objectives as printed, the errors of the others, and the error of the diagonal one."""
    found = {row['model']: row for row in rows}
    right = [
        name.removeprefix('Longhorn, ') for name, row in found.items()
        if row['printed'] and row['printed']['update_distance']['largest'] < 1e-5
    ]
    formula, op = (number(max(row[x]['largest'] for row in rows)) for x in ('update_distance', 'op_distance'))
    gla, diagonal = (number(found[name]['printed']['update_distance']['median']) for name in ('GLA', 'Longhorn, diagonal'))
    errors = {name: f'{x:.2f}' for name, x in cell['recall_error'].items()}
    step, share = number(cell['of_step']['median']), f'{cell["erased"]:.0%}'
    points = (
        f'- {", ".join(right[:-1])} and {right[-1]}: the update is the minimiser of the objective as printed.',
        f'- GLA: the printed sign of the inner product is a misprint. The update is {gla} away from the minimiser of what is '
        'printed. With a minus in place of the plus it is the minimiser.',
        '- Griffin: the last term of the printed objective is a vector, not a number: its sum is missing. With the sum, the '
        'update is the minimiser.',
        f'- Longhorn, diagonal: the printed update approximates. It is {diagonal} away from the minimiser; Theorem 3.1 is the '
        'minimiser.',
        f'- With the objectives as they should be, the largest distance of any row is {formula} for the formulas. It is {op} '
        "for the code that runs them: fla's computes in float32.",
        f'- How much the diagonal update misses, at K = {cell["K"]} and β|k|² = {cell["beta_k2"]:g}: a step ends {step} of '
        f"the minimiser's step away from the minimiser. It removes {share} of the old recall that the minimiser removes. The "
        f'error of the recall, relative to the input, is {errors["before"]} before the step, {errors["diagonal"]} after it, '
        f'and {errors["minimiser"]} at the minimiser.',
    )
    return '\n'.join(fill(point, 127, subsequent_indent='  ') for point in points)


def draw(report: dict, path: str) -> None:
    """Distance, old recall removed and recall of a repeated pair, against K."""
    figure = Figure(figsize=(13, 4), dpi=140, layout='constrained')
    far, erased, repeated = figure.subplots(1, 3)
    strengths = list(dict.fromkeys(row['beta_k2'] for row in report['diagonal']))[:MOST]
    for strength, color in zip(strengths, shades(len(strengths)), strict=True):
        rows = [row for row in report['diagonal'] if row['beta_k2'] == strength]
        options = {'color': color, 'marker': 'o', 'markersize': 3, 'label': f'β|k|² = {strength:g}'}
        far.plot([row['K'] for row in rows], [row['of_step']['median'] for row in rows], **options)
        erased.plot([row['K'] for row in rows], [row['erased'] for row in rows], **options)
    # every second size, down from the largest; one entry is the exact update, of any size
    sizes = list(dict.fromkeys(row['K'] for row in report['repeats']))
    sizes = sorted({sizes[0], *sizes[:0:-2][:MOST - 1]})
    for K, color in zip(sizes, shades(len(sizes)), strict=True):
        rows = [row for row in report['repeats'] if row['K'] == K]
        repeated.plot([row['repeats'] for row in rows], [row['diagonal'] for row in rows], color=color, marker='o',
                      markersize=3, label='K = 1, and the exact update' if K == 1 else f'K = {K}')
    finish(far, "One diagonal step: error, as a share of the exact step", 'K, entries of a key', '|S - S*| / |S* - P|', False)
    finish(erased, 'Old recall removed, as a share of the exact step', 'K, entries of a key', '', False)
    finish(repeated, 'One pair written again and again: recall', 'times written', 'multiple of the input (1 is right)')
    for axis in (far, erased):
        axis.set_ylim(0, None)
    for axis in (far, erased, repeated):
        label_ends(axis)
    figure.savefig(path)


def shades(count: int) -> list:
    """Blues from light to dark: all lines of a panel are the diagonal update's."""
    return [colormaps['Blues'](0.4 + 0.6 * (i + 1) / count) for i in range(count)]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m lab.experiments objectives', description=__doc__.splitlines()[0])
    parser.add_argument('--json', metavar='FILE', help='write the figures here')
    parser.add_argument('--plot', metavar='FILE.png', help='draw the figures here')
    options = parser.parse_args(args)
    report = measure()
    # the tables are made from the file's figures
    report = json.loads(json.dumps(report))
    for name, text in tables(report).items():
        print(f'{name}\n\n{text}\n')
    if options.json:
        write_report(report, options.json)
    if options.plot:
        draw(report, options.plot)
