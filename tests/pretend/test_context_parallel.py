"""What ranks of context parallelism exchange is on the device: states, summaries and their gradients."""

from tests import forks


def test_two_ranks_equal_one():
    forks.output('-m', 'tests.pretend.ranks', env={'PRETEND_FAST': '1'})
