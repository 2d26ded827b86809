"""The mutations of `tests.mutate` fit the package and its tests as they are; `make mutate` runs them."""

import pytest

from tests import forks
from tests.mutate.mutation import ROOT
from tests.mutate.rooms import MUTATIONS, ROOMS
from tests.mutate.run import collect


@pytest.mark.parametrize('name', list(MUTATIONS))
def test_fits_its_file(name):
    mutation = MUTATIONS[name]
    path = ROOT / mutation.path
    compile(mutation.apply(path.read_text(encoding='utf-8')), path, 'exec')


def test_names_are_unique():
    assert len(MUTATIONS) == sum(map(len, ROOMS.values()))


def pytest_here(*arguments, env):
    done = forks.run('-m', 'pytest', '-q', '-p', 'no:cacheprovider', *arguments, env=env)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_its_tests_exist():
    cases = collect(pytest_here, MUTATIONS)
    assert cases.keys() == MUTATIONS.keys() and all(cases.values())
