"""The page that a reader chooses a mixer by: its figures are those of the pages and files that it cites."""

import json
import re

from lab.experiments.report import ROOT

DOCS = ROOT / 'docs'
# with a decimal point, a percent sign or thousands
FIGURE = re.compile(r'(?<![\w.#-])\d+(?:,\d{3})*(?:\.\d+)?%?(?![\w])')


def figures(text: str) -> set[str]:
    """Figures outside code and the targets of links."""
    found = FIGURE.findall(re.sub(r'`[^`]*`|\]\([^)]*\)', ' ', text))
    return {x for x in found if re.search('[.,%]', x)}


def computed() -> set[str]:
    """What stands on no page: sizes of states by the settings."""
    models = json.loads((ROOT / 'lab/experiments/settings/lm_2M.json').read_text())
    D, mamba = models['model']['hidden_size'], models['models']['Mamba-2']
    language = [2 * D * 16, mamba['num_heads'] * mamba['head_dim'] * mamba['state_size'], D // 2 * D, D * D]
    small = json.loads((ROOT / 'lab/experiments/settings/mad_small.json').read_text())['options']
    W, K = small['hidden_size'], small['state_size']
    anew = json.loads((ROOT / 'lab/experiments/settings/forgetting.json').read_text())['options']
    recall = [2 * W * K, W * W, W * 2 * W, 2 * anew['hidden_size'] * anew['state_size']]
    return {*(f'{x:,}' for x in language + recall)}


def test_figures_are_those_of_the_pages():
    names = ('docs/experiments.md', 'docs/results.md', 'docs/others.md', 'README.md')
    known = computed().union(*(figures((ROOT / name).read_text()) for name in names))
    own = figures((DOCS / 'choose.md').read_text())
    assert len(own) > 100
    assert own <= known, sorted(own - known)


def test_pictures_are_few():
    assert len(re.findall(r'^!\[', (DOCS / 'choose.md').read_text(), re.M)) <= 5
