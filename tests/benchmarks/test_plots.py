"""Pictures that a person can read: few lines a panel, each named at its end, Longhorn's in colour."""

import json
import struct
from itertools import pairwise

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.report import plots
from benchmarks.report.page import RESULTS
from benchmarks.report.pictures import DRAW, pictures
from experiments.pictures import DRAW as EXPERIMENTS
from experiments.report import RESULTS as EXPERIMENTS_RESULTS

PICTURES = pictures(DRAW, RESULTS) | pictures(EXPERIMENTS, EXPERIMENTS_RESULTS)


def is_grey(color) -> bool:
    return max(to_rgb(color)) - min(to_rgb(color)) < 0.1


@pytest.fixture(params=list(PICTURES), ids=lambda path: path.stem, scope='module')
def figure(request):
    """A committed picture as it is drawn from its JSON, and the size of the committed file."""
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, 'savefig', lambda figure, path: drawn.append(figure))
        PICTURES[request.param](json.loads(request.param.with_suffix('.json').read_text()), '')
    figure, = drawn
    figure.png_size = struct.unpack('>II', request.param.read_bytes()[16:24])
    return figure


def test_a_panel_holds_few_lines_with_names_at_their_ends(figure):
    assert not figure.legends
    figure.draw_without_rendering()
    for axis in figure.axes:
        assert axis.get_legend() is None
        assert len(axis.lines) <= 6
        texts = {text.get_text(): text for text in axis.texts}
        boxes = []
        for line in axis.lines:
            text = texts[line.get_label()]
            assert text.get_color() == line.get_color()
            # of the text alone, without its leader
            box = Text.get_window_extent(text)
            assert box.x0 >= axis.get_window_extent().x1 and box.x1 <= figure.bbox.x1
            boxes.append(box)
        boxes.sort(key=lambda box: box.y0)
        assert all(high.y0 - low.y0 > plots.FONT * figure.dpi / 72 for low, high in pairwise(boxes))
        if axis.collections and not axis.lines:
            assert len(axis.get_yticks()) <= 6


def test_ours_are_in_colour(figure):
    for axis in figure.axes:
        for line in axis.lines:
            name = line.get_label().split('  ')[-1]
            # the lines of the pictures of one update say their option
            if not name.startswith(('K = ', 'β', '1 layer', '2 layers')):
                assert is_grey(line.get_color()) != plots.own(name), name
        for label, bar in zip(axis.get_yticklabels(), axis.patches, strict=False):
            assert is_grey(bar.get_facecolor()) != plots.own(label.get_text()), label


def test_the_committed_picture_is_this_one(figure):
    """By its size, which the fonts of a machine don't change."""
    assert figure.png_size == tuple(round(x * figure.dpi) for x in figure.get_size_inches())


def test_spread_out():
    """As near as a gap and the limits allow."""
    assert plots.spread_out([0, 10, 20], 5, 0, 20) == [0, 10, 20]
    assert plots.spread_out([10, 10, 10], 4, 0, 20) == [6, 10, 14]
    assert plots.spread_out([0, 1], 4, 0, 20) == [0, 4]
    assert plots.spread_out([19, 20, 20], 4, 0, 20) == [12, 16, 20]
    # two pairs that meet once they are apart
    assert plots.spread_out([5, 5, 8, 8], 4, 0, 20) == [0.5, 4.5, 8.5, 12.5]


def test_shown():
    """Ours, then the cheapest others."""
    names = ['a', 'b', 'c', 'd', 'e', 'chunk_longhorn', 'diagonal', 'f']
    costs = dict(zip('abcdef', range(6, 0, -1), strict=True))
    assert plots.shown(names, costs) == ['c', 'd', 'e', 'chunk_longhorn', 'diagonal', 'f']
