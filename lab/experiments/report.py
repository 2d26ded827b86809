"""The experiments' page, `docs/experiments.md`, from the JSON files in `lab/experiments/results/`.

    python -m lab.experiments report [--check]

`--check` writes nothing, and fails if the page is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.report.page import ROOT, Section, body, main_of
from benchmarks.report.tables import table
from lab.experiments.language_sections import extrapolation, language_modeling, state_dtypes
from lab.experiments.mqar import DOUBLED, grid_cells
from lab.experiments.recall import best_runs
from lab.experiments.sections import heading, options, predictions, shares, spread
from lab.experiments.synthetic import describe_task

RESULTS, PAGE = ROOT / 'lab' / 'experiments' / 'results', ROOT / 'docs' / 'lab.experiments.md'
HEADER = """# The paper's experiments, at a small size

`python -m lab.experiments report` writes this page from the files in [`lab/experiments/results`](../experiments/results).
[choose.md](choose.md) says what follows from them, [paper.md](paper.md) which experiment of the paper is which command. The
runs took {hours:.0f} hours of one or two processor cores, in part beside other work.

Not run: of Fig. 4's smallest column two of four rates, most models of width 128 and most with 128 tokens; recall by state size
with 512 tokens, but at K = 128; MAD at its own size; language models above
two million parameters, or on more than 3.3 million tokens; more than one seed where a section says so.
"""


def guessing(num_pairs: int) -> float:
    """Recall of guessing among a sequence's values, 1 to `num_pairs` of them, without keys (`examples/mqar/data.py`)."""
    right = sum(1 / left for n in range(1, num_pairs + 1) for left in range(1, n + 1))
    return right / (num_pairs * (num_pairs + 1) / 2)


def recall(report: dict) -> str:
    """Recall at every rate, by the options of the setting's columns."""
    pairs = sorted({run['cell']['num_pairs'] for run in report['runs']})
    guesses = ', '.join(f'{guessing(n):.1%} with up to {n} pairs' for n in pairs)
    return heading(report, (
        f'{options(report)}. Guessing among the values that a sequence has not yet shown as answers recalls {guesses}. '
        f'{report["setting"].get("note", "")}'
    )).rstrip() + f'\n\n{RULE}\n{OLDER}\n\n' + recall_table(report)


def recall_table(report: dict) -> str:
    """A row for each combination of the setting's columns."""
    runs, names = report['runs'], [x for x in report['setting']['columns'] if x not in ('seed', 'learning_rate')]
    rates = sorted({run['cell']['learning_rate'] for run in runs})

    def by_group(some: list[dict]) -> dict[tuple, list[float]]:
        groups = {}
        for run in some:
            groups.setdefault(tuple(run['cell'][name] for name in names), []).append(run['recall'])
        return groups

    at = [by_group([run for run in runs if run['cell']['learning_rate'] == rate]) for rate in rates]
    best = best_runs(runs)
    result = by_group(best)
    rate_of = {tuple(run['cell'][name] for name in names): run['cell']['learning_rate'] for run in best}
    rows = [
        [*key, *(shares(groups[key]) if key in groups else 'not run' for groups in at), rate_of[key], shares(result[key]),
         len(result[key])]
        for key in sorted(result, key=lambda key: key[::-1])
    ]
    columns = [*names, *(f'rate {rate}' for rate in rates), 'selected', 'recall at the selected rate', 'seeds']
    return table(columns, rows)


def recall_by_width(report: dict) -> str:
    return recall(report) + '\n\n' + RATES


# the change, and its mixers before and after
CHANGES = (
    ('one step size per head, not per channel', 'diagonal', 'scalar beta'),
    ('exact, not diagonal', 'diagonal', 'exact'),
    ('normalised keys, diagonal', 'diagonal', 'diagonal, normalised keys'),
    ('normalised keys, exact', 'exact', 'exact, normalised keys'),
)


GATES = {None: 'none', 'channel': 'per channel', 'head': 'per head', 'key': 'per entry of the key'}
# recall that guessing does not reach
LEFT = 0.6
PROGRESS = (f'step with more than {LEFT:.0%}', 'after 200', 'after 400', 'after 600', 'test recall')
TWO_LAYERS = """Other seeds, the present start with more steps and the convolution were not tried. Two layers learn
zoology's version of the task in a few epochs (below), with embeddings that start at 0.02: a vocabulary of 8,192, 4 pairs,
a rate of 0.01, batches of 512 and weight decay differ there. The next section says why larger embeddings help."""
SIZE_COUNTS = """What counts is the size of the embeddings beside that of the branches, in the sum that the second layer reads;
that frozen embeddings of 0.1 learn too, it does not explain. One seed each."""
RULE = """Recall on test sequences: mean over the seeds (lowest to highest). One learning rate is selected for all seeds, by
the mean recall on validation sequences at the end of training. All rates that were tried have a column."""
OLDER = 'These runs are older than this rule; it was applied to the recalls that they kept.'
RATES = 'At width 32 the order of diagonal and exact depends on the learning rate.'
ABLATIONS = """Each recall is at the learning rate selected for its update, so the differences include that selection: at one
rate, exact and diagonal swap places (see the recall table above)."""


def differences(recalls: dict, losses: dict, long: dict) -> dict[str, dict[str, list[float]]]:
    """The effect of each change on each figure, seed by seed: recall in points, loss in nats."""
    figures = {}
    for run in best_runs(recalls['runs']):
        cell = run['cell']
        column = f'recall, {cell["seq_len"]} tokens, width {cell["hidden_size"]}'
        figures.setdefault(column, {})[cell['mixer'], cell['seed']] = 100 * run['recall']
    for report, described, loss in (
        (losses, lambda run: f'loss, {losses["setting"]["block_size"]} tokens', lambda run: run['loss']),
        (long, lambda run: f'loss, up to {run["spans"][-1]["end"]} tokens', lambda run: run['spans'][-1]['loss']),
    ):
        for run in report['runs']:
            figures.setdefault(described(run), {})[run['model'].removeprefix('Longhorn, '), run['seed']] = loss(run)
    return {
        change: {
            column: [y - x[before, seed] for (mixer, seed), y in x.items() if mixer == after] for column, x in figures.items()
        }
        for change, before, after in CHANGES
    }


def ablations(*reports: dict) -> str:
    changes = differences(*reports)
    rows = []
    for change, figures in changes.items():
        cells = []
        for column, x in figures.items():
            cells.append(spread(x, '+.1f' if column.startswith('recall') else '+.4f'))
        rows.append([change, *cells])
    return ('## Ablations\n\nThe effect of one change on the results above: the difference, seed by seed, as a mean (lowest '
            'to highest). Recall is in percentage points, higher is better. Loss is in nats per token, lower is better. The '
            f'last column is the loss of the {reports[-1]["block_size"]} tokens before that position.\n\n'
            + table(['change', *next(iter(changes.values()))], rows) + '\n\n' + ABLATIONS)


def by_state_size(report: dict) -> str:
    """Recall of each state size."""
    return heading(report, (
        f'{options(report)}. {report["setting"]["note"]}\n\n{RULE}\n\n{recall_table(report)}\n\n'
        + predictions(report['setting'])
    ))


def two_layers(report: dict) -> str:
    """Each run's change and recall, and the distance from the losses of a model in plain PyTorch."""
    rows = []
    for run in report['runs']:
        cell = run['cell']
        rows.append([
            cell['change'], cell['learning_rate'], cell.get('initializer_range', 0.1), cell['steps'], *progress(run),
        ])
    plain = report['plain']
    return heading(report, (
        f'One seed each. Guessing among the values not yet shown recalls {guessing(8):.1%}. '
        f'The step is the first evaluation above {LEFT:.0%}; all columns but the last are on validation sequences.\n\n'
        + table(['change', 'rate', 'embeddings start with', 'steps', *PROGRESS], rows) + f"""

That two layers stay near guessing is not due to this package: a plain PyTorch model (`python -m lab.experiments plain`) with
the same weights and data has the same losses over the first {len(plain["ours"])} steps, to {plain["largest_difference"]:.0e}.
""" + TWO_LAYERS
    ))


def progress(run: dict) -> list:
    """The columns `PROGRESS` of a run."""
    at = dict(map(tuple, run['history']))
    left = next((step for step, recall in run['history'] if recall > LEFT), 'not left')
    return [left, *(f'{at[step]:.0%}' if step in at else '' for step in (200, 400, 600)), f'{run["recall"]:.1%}']


def smallest_column(report: dict) -> str:
    """The runs by zoology's rules, and what of the grid was not run."""
    setting, fixed = report['setting'], report['setting']['options']

    def place(cell: dict) -> tuple[tuple, tuple]:
        row, column = ('mixer', 'seq_len', 'num_pairs'), ('hidden_size', 'learning_rate')
        return tuple(cell[name] for name in row), tuple(cell[name] for name in column)

    places = [place(cell) for cell in grid_cells(setting)]
    columns = dict.fromkeys(column for _, column in places)
    runs: dict[tuple[tuple, tuple], list[dict]] = {}
    for run in report['runs']:
        runs.setdefault(place(run['cell']), []).append(run)
    rows = [
        [*row, *(passed(runs.get((row, column), []), fixed['stop_recall']) for column in columns)]
        for row in dict.fromkeys(row for row, _ in places)
    ]
    return heading(report, (
        f'{fixed["num_hidden_layers"]} layers, a vocabulary of {fixed["vocab_size"]:,}, {fixed["train_size"]:,} training '
        f'sequences, batches of {fixed["batch_size"]}. Training ends after the first epoch whose validation recall is above '
        f'{fixed["stop_recall"]:.0%}, or after {fixed["last_epoch"]} of {fixed["epochs"]} planned. The table has the '
        "seeds' epochs and their mean recall on test sequences (lowest to highest), in brackets if a seed did not get there; "
        '- was not run.\n\n'
        + table(['mixer', 'tokens', 'pairs', *(f'width {width}, rate {rate}' for width, rate in columns)], rows)
        + '\n\n' + predictions(setting)
    ))


def passed(runs: list[dict], stop_recall: float) -> str:
    """Each run's epochs and their mean test recall, in brackets if one did not pass `stop_recall`."""
    if not runs:
        return '-'
    text = f'{", ".join(str(len(run["history"])) for run in runs)}: {shares([run["recall"] for run in runs])}'
    return text if all(run['history'][-1][1] > stop_recall for run in runs) else f'[{text}]'


def synthetic(report: dict) -> str:
    """Accuracy of each mixer on each task, by length where other lengths were read."""
    of: dict[str, dict[str, list[dict]]] = {}
    for run in best_runs(report['runs']):
        gate = run['cell'].get('gate')
        mixer = run['cell']['mixer'] + (f', gate {GATES[gate]}' if gate else '')
        of.setdefault(mixer, {}).setdefault(describe_task(run['cell']), []).append(run)
    tasks = list(dict.fromkeys(task for some in of.values() for task in some))
    lengths = {
        task: ' / '.join(run['by_length']) for some in of.values() for task, (run, *_) in some.items() if 'by_length' in run
    }

    def shown(some: list[dict] | None) -> str:
        if some is None:
            return 'not run'
        if 'by_length' not in some[0]:
            return shares([run['recall'] for run in some])
        return ' / '.join(spread([run['by_length'][n] for run in some], '.0%') for n in some[0]['by_length'])

    rows = [[mixer, f'{next(iter(some.values()))[0]["parameters"]:,}', *(shown(some.get(task)) for task in tasks)]
            for mixer, some in of.items()]
    columns = ''.join(dict.fromkeys(
        f' The columns hold the accuracy of the tokens up to {n}.' if 'longest' in report['setting']['options']
        else f' For {task} they hold the accuracy on sequences of {n} tokens.' for task, n in lengths.items()
    ))
    return heading(report, (
        f'{options(report)}; {report["setting"]["note"]}{columns} '
        f'{sum(run["seconds"] for run in report["runs"]) / 3600:.1f} hours, beside other work.\n\n'
        + table(['mixer', 'parameters', *tasks], rows) + '\n\n' + predictions(report['setting'])
    ))


def by_gate(report: dict) -> str:
    """Accuracy of each update, gate and step: at the trained length, then by length."""
    def place(cell: dict) -> tuple:
        doubled = cell.get('doubled') or cell.get('allow_neg_eigval') or DOUBLED in cell['mixer']
        return cell['mixer'].removesuffix(f', {DOUBLED}'), GATES[cell['gate']], 'doubled' if doubled else 'single'

    groups: dict[tuple, list[dict]] = {place(cell): [] for cell in grid_cells(report['setting'])}
    for run in report['runs']:
        groups[place(run['cell'])].append(run)
    lengths, rows = list(report['runs'][0].get('by_length', ())), []
    for key, tried in groups.items():
        runs, rates = best_runs(tried), {run['cell']['learning_rate'] for run in tried}
        values = [[run['recall'] for run in runs], *([run['by_length'][n] for run in runs] for n in lengths)]
        rate = f'{runs[0]["cell"]["learning_rate"]:g} of {len(rates)}' if runs else ''
        ran = [f'{runs[0]["parameters"]:,}', len(runs), *map(shares, values)] if runs else ['', 'not run', *[''] * len(values)]
        rows.append([*key, rate, *ran])
    columns = ['mixer', 'gate', 'steps', 'rate', 'parameters', 'seeds', 'accuracy', *(f'up to {n}' for n in lengths)]
    return heading(report, (
        f'{options(report)}; {report["setting"]["note"]} The rate is the best of those tried, by the mean on '
        'sequences for validation. Of several seeds: mean (lowest to highest). '
        f'{sum(run["seconds"] for run in report["runs"]) / 3600:.1f} hours, beside other work.\n\n'
        + table(columns, rows) + '\n\n' + predictions(report['setting'])
    ))


def why_larger(report: dict) -> str:
    """Controls of the rate of the embeddings."""
    rows = [[run['cell']['change'], *progress(run)] for run in report['runs']]
    return heading(report, (
        f'Otherwise as above. {report["setting"]["note"]}\n\n'
        + table(['change', *PROGRESS], rows) + '\n\n' + predictions(report['setting']) + '\n\n' + SIZE_COUNTS
    ))


SECTIONS: tuple[Section, ...] = (
    (('mqar_exact',), recall, 'mqar_exact'),
    (('mqar_state',), by_state_size, 'mqar_state'),
    (('mqar_small',), recall_by_width, 'mqar_small'),
    (('mqar_depth',), two_layers, 'mqar_depth'),
    (('mqar_depth_why',), why_larger, None),
    (('state_tracking',), synthetic, 'state_tracking'),
    (('forgetting',), by_gate, None),
    (('parity_gates',), by_gate, None),
    (('recall_gates',), by_gate, None),
    (('memory_tasks',), synthetic, None),
    (('mad_small',), synthetic, 'mad_small'),
    (('mqar_zoology_small',), smallest_column, 'mqar_zoology_small'),
    (('lm_small',), language_modeling, 'lm_small'),
    (('lm_families',), language_modeling, 'lm_families'),
    (('lm_gates',), language_modeling, 'lm_gates'),
    (('lm_2M',), language_modeling, 'lm_2M'),
    (('extrapolation',), extrapolation, 'extrapolation'),
    (('extrapolation_families',), extrapolation, 'extrapolation_families'),
    (('extrapolation_gates',), extrapolation, None),
    (('extrapolation_2M',), extrapolation, 'extrapolation_2M'),
    (('state_dtypes',), state_dtypes, None),
    (('mqar_small', 'lm_small', 'extrapolation'), ablations, None),
)


def pages() -> dict[Path, str]:
    names = dict.fromkeys(name for some, _, _ in SECTIONS for name in some)
    reports = [json.loads((RESULTS / f'{name}.json').read_text()) for name in names]
    runs = (run for report in reports for part in ('search', 'runs') for run in report.get(part, ()))
    header = HEADER.format(hours=sum(run.get('seconds', 0) for run in runs) / 3600)
    return {PAGE: header + '\n' + body(SECTIONS, RESULTS, '../experiments/results')}


def main(args: list[str] | None = None) -> int:
    return main_of('python -m lab.experiments report', pages, args)
