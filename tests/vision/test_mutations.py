"""The mutations of `tests/mutate/rooms/vision.py` fit the package and its tests; `python -m tests.mutate` runs them."""

from tests.mutate.mutation import ROOT
from tests.mutate.rooms import vision
from tests.mutate.run import collect
from tests.test_mutations import pytest_here

MUTATIONS = {mutation.name: mutation for mutation in vision.MUTATIONS}


def test_they_fit():
    assert len(MUTATIONS) == len(vision.MUTATIONS)
    for mutation in MUTATIONS.values():
        path = ROOT / mutation.path
        compile(mutation.apply(path.read_text(encoding='utf-8')), path, 'exec')
    assert collect(pytest_here, MUTATIONS).keys() == MUTATIONS.keys()
