"""The paper's Table 4 (arXiv 2407.14207): each update against the numerical minimiser of its objective."""

import pytest
import torch

from experiments.objectives import distance, random_tokens
from experiments.table4 import TABLE, VARIANTS, minimiser

# fla's naive ops and transformers' RG-LRU compute in float32, this package's in its inputs' float64
FLOAT32, FLOAT64 = 1e-6, 1e-10
ROWS = {row.name: row for row in (*TABLE, *VARIANTS)}
EXACT = [
    'LA', 'RetNet', 'GLA', 'Griffin', 'Longhorn, Theorem 3.1', 'Longhorn, diagonal',
    "Griffin's own update, the factor √(1 - α²) in the objective too",
]
SIZES = [(1, 3), (4, 6), (16, 5)]


def problem(name='', K=5, V=7, T=6, norm2=1.0, seed=0):
    """A random state and tokens; Griffin's state has one entry a channel."""
    generator = torch.Generator().manual_seed(seed)
    K = 1 if 'Griffin' in name else K
    return torch.randn(K, V, generator=generator, dtype=torch.float64), random_tokens(T, K, V, norm2, generator)


def distances(row, P, tokens):
    """Of the formula and of the op from the minimiser, for each token, from the state that the op left."""
    result = []
    for token in tokens:
        best, run = minimiser(row.objective, P, token), row.op(P, token).to(P.dtype)
        result.append((distance(row.update(P, token), best), distance(run, best)))
        P = run
    return zip(*result, strict=True)


@pytest.mark.parametrize('name', [row.name for row in TABLE])
def test_the_solver_finds_what_lbfgs_finds(name):
    P, (token,) = problem(name, T=1, norm2=2.0)
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


@pytest.mark.parametrize('K, V', SIZES)
@pytest.mark.parametrize('name', EXACT)
def test_update_is_the_minimiser(name, K, V):
    updates, ops = distances(ROWS[name], *problem(name, K, V))
    assert max(updates) <= FLOAT64
    assert max(ops) <= (FLOAT64 if 'Longhorn' in name else FLOAT32)
