"""Every measured figure that the pages quote outside of the tables drawn for them is the committed one."""

import json
import re
from statistics import mean

import pytest

from benchmarks.experiments.mqar import best_runs
from benchmarks.report.page import RESULTS, ROOT

EXACT = (ROOT / 'docs' / 'exact.md').read_text()
UPDATES = ('diagonal', 'exact', 'scalar beta')


def read(name):
    return json.loads((RESULTS / f'{name}.json').read_text())


def words(text):
    """As a reader sees it: line breaks are spaces."""
    return ' '.join(text.split())


def percent(recalls):
    low, high = (f'{100 * f(recalls):.0f}' for f in (min, max))
    return f'{mean(recalls):.0%} ({low} to {high})'


def recalls(runs, **cell):
    return [run['recall'] for run in runs if all(run['cell'][name] == x for name, x in cell.items())]


def row(*cells):
    return f'| {" | ".join(map(str, cells))} |'


@pytest.mark.parametrize('K', [16, 64, 128])
def test_recall_by_state_size(K):
    best = best_runs(read('mqar_exact')['runs'])
    assert row(f'K = {K}', *(percent(recalls(best, mixer=mixer, state_size=K)) for mixer in UPDATES)) in EXACT


def test_what_is_said_of_recall_by_state_size():
    runs = read('mqar_exact')['runs']
    best = best_runs(runs)
    at_128 = [recalls(best, mixer=mixer, state_size=128) for mixer in ('diagonal', 'exact')]
    assert sum(exact > diagonal for diagonal, exact in zip(*at_128, strict=True)) == 2
    for K in (16, 64, 128):
        assert max(UPDATES, key=lambda mixer: max(recalls(best, mixer=mixer, state_size=K))) == 'exact'
    failed = [f'{x:.0%}' for x in recalls(runs, mixer='exact', state_size=16, learning_rate=0.0046) if x < 0.2]
    assert f'({" and ".join(failed)})' in EXACT and len(failed) == 2
    assert max(recalls(runs, learning_rate=0.0046, state_size=128), default=0) == 0


@pytest.mark.parametrize('pairs', [8, 16])
def test_recall_by_width(pairs):
    runs = read('mqar_small')['runs']
    some = {'num_pairs': pairs, 'hidden_size': 32}
    cells = [percent(recalls(best_runs(runs), mixer=mixer, **some)) for mixer in ('diagonal', 'exact')]
    assert row(f'up to {pairs} pairs', *cells) in EXACT
    for rate in (0.0046, 0.01):
        means = {mixer: mean(recalls(runs, mixer=mixer, learning_rate=rate, **some)) for mixer in UPDATES[:2]}
        low, high = sorted(means, key=means.get)
        said = rf'{high}( is ahead)? at {rate} \({means[high]:.0%} against {means[low]:.0%}\)'
        assert re.search(said, words(EXACT)), said


def test_losses():
    runs = read('lm_small')['runs']
    losses = {name: [run['loss'] for run in runs if run['model'] == f'Longhorn, {name}'] for name in UPDATES}
    assert ', '.join(f'{mean(x):.3f} {name}' for name, x in losses.items()) in words(EXACT)
    spans = [max(x) - min(x) for x in losses.values()]
    assert f'Each spans {min(spans):.3f} to {max(spans):.3f} over its seeds' in words(EXACT)


@pytest.mark.parametrize('name', UPDATES)
def test_perplexities(name):
    cells = []
    for end in (129, 513, 1025, 2048):
        values = [
            span['perplexity'] for run in read('extrapolation')['runs'] if run['model'] == f'Longhorn, {name}'
            for span in run['spans'] if span['end'] == end
        ]
        cells.append(f'{mean(values):.2f}' + (f' ({min(values):.2f} to {max(values):.2f})' if end > 1000 else ''))
    assert row(name, *cells) in EXACT


def test_bytes_moved():
    rows = read('traffic')['rows']
    ratios, lines = [], {
        'diagonal, ours': 'Longhorn scalar', 'diagonal, `chunk_gla`': 'chunk_gla', 'exact, ours': 'Longhorn exact scalar',
        'exact, `chunk_delta_rule`': 'chunk_delta_rule',
    }
    found = {(x['operator'], x['K']): x['forward']['bytes'] + x['backward']['bytes'] for x in rows}
    for label, operator in lines.items():
        assert row(label, *(f'{found[operator, K]:.1f}' for K in (16, 32, 64, 128))) in EXACT
    ratios = [found['Longhorn exact scalar', K] / found['chunk_delta_rule', K] for K in (16, 32, 64, 128)]
    assert f'{min(ratios):.2f} to {max(ratios):.2f} of the delta rule' in words(EXACT)


def test_instructions():
    """The table of docs/exact.md, and the counts in the text below it."""
    rows = [x for x in read('kernels') if x['target'] == 'sm_90']

    def cost(update, direction, K):
        some = [x for x in rows if (x['update'], x['pass'], x['K']) == (update, direction, K)]
        return round(K * sum(x['instructions_per_state_update'] for x in some if x['kernel'] != 'recurrent'))

    for label, direction in (('forward, saving states', 'forward'), ('backward', 'backward')):
        assert row(label, *(cost(update, direction, K) for K in (16, 64, 128) for update in UPDATES[:2])) in EXACT
    unsaved = next(line for line in EXACT.splitlines() if line.startswith('| forward, nothing saved'))
    inference = [
        round(K * sum(x['instructions_per_state_update'] for x in rows
                      if (x['update'], x['pass'], x['K']) == ('exact', 'inference', K) or
                      (x['update'], x['pass'], x['K'], x['kernel']) == ('exact', 'forward', K, 'gram')))
        for K in (16, 64, 128)
    ]
    assert [int(x) for x in unsaved.split('|')[3:-1:2]] == inference
    recurrent, = (x for x in rows if (x['kernel'], x['K']) == ('recurrent', 16))
    assert f'{16 * recurrent["instructions_per_state_update"]:.0f} instructions at K = 16' in EXACT
    spills = [sum(x['spills'] for x in rows if (x['update'], x['pass'], x['K']) == ('exact', direction, 128))
              for direction in ('forward', 'backward')]
    assert '{} values spill in the forward and {} in the backward'.format(*spills) in words(EXACT)
    both = cost('diagonal', 'forward', 16) + cost('diagonal', 'backward', 16)
    assert f'instructions, {both} at K = 16' in words(EXACT)


def test_the_demo():
    """What the README and docs/exact.md say of `make demo`, and its picture, are the committed run."""
    report = json.loads((ROOT / 'docs' / 'images' / 'mqar.json').read_text())
    readme = words((ROOT / 'README.md').read_text())
    assert re.search(rf'After {report["steps"]} steps .*? recalls {report["recall"]:.1%} ', readme)
    assert f'width 128 and {report["steps"]} steps, the diagonal update reaches {report["recall"]:.1%}.' in words(EXACT)
    assert f'{report["parameters"] / 1e3:.0f}k parameters' in readme


def test_tokens_a_second_of_servers():
    page = (ROOT / 'docs' / 'serve.md').read_text()
    for x in read('serving')['rows']:
        assert row(x['requests'], *(f'{x["tokens_per_s"][name]:.0f}' for name in ('vllm', 'generate'))) in page


def test_accuracy_on_digits():
    report, page = read('vision'), (ROOT / 'docs' / 'vision.md').read_text()
    runs = {}
    for x in report['runs']:
        runs.setdefault(x['model'], []).append(x)
    for name, some in runs.items():
        accuracies = [100 * x['accuracy'] for x in some]
        seconds = sum(x['seconds'] for x in some) / len(some)
        shown = ' and '.join(f'{x:.1f}%' for x in accuracies), f'{sum(accuracies) / len(some):.1f}%', f'{seconds:.0f}'
        assert row(name, f'{some[0]["parameters"]:,}', *shown) in page
    assert len(runs) == 4 and all(len(some) == 2 for some in runs.values())
    assert f'{report["options"]["epochs"]} epochs' in page and f'{report["seconds"] / 60:.0f} minutes in all' in page
