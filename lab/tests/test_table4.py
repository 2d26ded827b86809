"""The minimisers by which the paper's Table 4 (arXiv 2407.14207) is judged are those that L-BFGS finds."""

import pytest
import torch

from lab.experiments.objectives import distance, random_tokens
from lab.experiments.table4 import TABLE, minimiser

ROWS = {row.name: row for row in TABLE}


@pytest.mark.parametrize('name', ROWS)
def test_minimiser(name):
    """Griffin's state has one entry a channel. The exact update is its objective's minimiser."""
    generator, K = torch.Generator().manual_seed(0), 1 if name == 'Griffin' else 5
    P, (token,) = torch.randn(K, 7, generator=generator, dtype=torch.float64), random_tokens(1, K, 7, 2.0, generator)
    S = torch.zeros_like(P).requires_grad_()
    solver = torch.optim.LBFGS([S], max_iter=500, tolerance_grad=1e-13, tolerance_change=0, line_search_fn='strong_wolfe')

    def loss():
        solver.zero_grad()
        value = ROWS[name].objective(S, P, token)
        value.backward()
        return value

    solver.step(loss)
    best = minimiser(ROWS[name].objective, P, token)
    assert distance(best, S.detach()) <= 1e-8
    gradient = torch.func.grad(lambda S: ROWS[name].objective(S, P, token))(best)
    assert gradient.abs().max() <= 1e-12
    if name == 'Longhorn, Theorem 3.1':
        assert distance(ROWS[name].op(P, token), best) <= 1e-10
