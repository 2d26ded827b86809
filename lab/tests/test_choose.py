"""Figures that the README and the page of choices quote stand in the notebook as they are quoted."""

import re

import pytest

from tests.forks import ROOT

# with a decimal point, a percent sign or thousands
FIGURE = re.compile(r'(?<![\w.#-])\d+(?:,\d{3})*(?:\.\d+)?%?(?![\w])')


def figures(text: str) -> set[str]:
    """Figures outside code and the targets of links."""
    found = FIGURE.findall(re.sub(r'`[^`]*`|\]\([^)]*\)', ' ', text))
    return {x for x in found if re.search('[.,%]', x)}


def section(text: str, title: str) -> str:
    return re.search(rf'^## {title}\n(.*?)^## ', text, re.M | re.S)[1]


@pytest.mark.parametrize('page', ['README.md', 'docs/choose.md'])
def test_figures_are_those_of_the_notebook(page):
    text = (ROOT / page).read_text()
    own = figures(text if page != 'README.md' else section(text, 'Which form') + section(text, 'Results'))
    known = set().union(*(figures(path.read_text()) for path in (ROOT / 'lab/notebook').glob('*.md')))
    assert len(own) > 10
    assert own <= known, sorted(own - known)
