import json

import pytest
import torch

from benchmarks import passes
from benchmarks.report.page import RESULTS
from fla_longhorn.ops import naive_recurrent_longhorn


@pytest.mark.parametrize('name', ['exact', 'diagonal'])
def test_calls_are_the_layer_s(name):
    """With gate, skip and logits of beta, each of them a leaf."""
    torch.manual_seed(0)
    run, leaves = passes.make_call(name, 4, (2, 9, 6), 'cpu')
    q, k, v, beta, D, z = (x.detach().double() for x in leaves)
    o, _ = naive_recurrent_longhorn(q, k, v, beta.sigmoid(), D=D, z=z, exact=name == 'exact')
    assert (run().double() - o).norm() < 1e-2 * o.norm()
    assert all(x.any() for x in torch.autograd.grad(run().sum(), leaves))


def test_what_is_measured_is_predicted():
    measured, predicted = (json.loads((RESULTS / f'{name}.json').read_text()) for name in ('h200_passes', 'predicted'))
    known = {(row['K'], row['pass']) for row in predicted['rows']}
    assert measured['rows'] and all((row['K'], row['pass']) in known for row in measured['rows'])
