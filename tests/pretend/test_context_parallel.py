"""What ranks of context parallelism exchange is on the device: states, summaries and their gradients."""

import json
from itertools import product

from tests import forks
from tests.distributed.test_op import check
from tests.pretend import ranks


def test_two_ranks_equal_one(tmp_path):
    path = tmp_path / 'errors.json'
    forks.output('-m', 'tests.pretend.ranks', path, env={'PRETEND_FAST': '1'})
    for name, exact in product(ranks.CASES, (False, True)):
        check(json.loads(path.read_text()), ranks.op.jobs(2), 2, exact, name)
