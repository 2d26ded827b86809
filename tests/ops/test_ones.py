"""Dimensions of size 1: no tensor is told from another by its shape."""

from itertools import product

import pytest

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.selfcheck.case import Case
from tests.ops.cases import check, interpreted

OPTIONS = [
    dict(scalar_beta=scalar_beta, g=g, **dict.fromkeys(('D', 'z', 'initial_state'), given))
    for scalar_beta, g, given in product((False, True), (None, 'head', 'channel'), (False, True))
]


@pytest.mark.parametrize('options', interpreted((5,), *OPTIONS), ids=lambda x: '-'.join(map(str, x.values())))
def test_sizes_of_one(options, exact, device, backend):
    for sizes in product((1, 2), repeat=5):
        check(chunk_longhorn, Case(*sizes, **options), device, exact)
