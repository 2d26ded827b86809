"""The paper's Table 4 (arXiv 2407.14207): each update against the numerical minimiser of its objective."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from fla.ops.retention.naive import naive_retention

from experiments import table4
from experiments.objectives import distance, measure_agreement, missed, random_tokens
from experiments.table4 import TABLE, VARIANTS, longhorn, minimiser
from fla_longhorn.ops import naive_recurrent_longhorn

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


def test_the_solver_refuses_what_has_no_minimum():
    P, (token,) = problem(T=1)
    with pytest.raises(torch.linalg.LinAlgError):
        minimiser(lambda S, P, t: -longhorn(S, P, t), P, token)


@pytest.mark.parametrize('K, V', SIZES)
@pytest.mark.parametrize('name', EXACT)
def test_update_is_the_minimiser(name, K, V):
    updates, ops = distances(ROWS[name], *problem(name, K, V))
    assert max(updates) <= FLOAT64
    assert max(ops) <= (FLOAT64 if 'Longhorn' in name else FLOAT32)


@pytest.mark.parametrize('name', [row.name for row in TABLE])
def test_what_is_printed(name):
    """LA, RetNet and Theorem 3.1 minimise it; GLA's sign and the diagonal of Theorem 3.1 don't; Griffin's is no number."""
    row, (P, tokens) = ROWS[name], problem(name)
    if name == 'Griffin':
        assert row.printed is None
        return
    for token in tokens:
        S, best = row.update(P, token), minimiser(row.printed, P, token)
        if name == 'GLA':
            torch.testing.assert_close(S - best, 2 * torch.outer(token.k, token.x), rtol=1e-9, atol=1e-12)
        else:
            assert (distance(S, best) <= FLOAT64) == (name != 'Longhorn, diagonal')
        P = S


@pytest.mark.parametrize('norm2', [0.01, 1.0, 100.0, 1e4])
def test_closed_form_with_any_key(norm2):
    updates, ops = distances(ROWS['Longhorn, Theorem 3.1'], *problem(K=16, norm2=norm2))
    assert max(updates) <= FLOAT64 and max(ops) <= FLOAT64


def test_retention_follows_the_minimisers():
    """fla's own reference of RetNet, which is parallel in time: its states, read by queries of one entry each."""
    T, K, V, H = 7, 4, 6, 2
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(H, T, K, generator=generator).double(), torch.randn(H, T, V, generator=generator).double()
    q = torch.eye(K, dtype=torch.float64)[:, None, None].expand(K, H, T, K) * K ** 0.5
    # [H, T, K, V]
    states = naive_retention(q, k.expand(K, H, T, K), v.expand(K, H, T, V)).permute(1, 2, 0, 3)
    for h in range(H):
        gamma = torch.tensor(1 - 2.0 ** (-5 - h), dtype=torch.float64)
        _, tokens = problem(T=T, K=K, V=V)
        path = [torch.zeros(K, V, dtype=torch.float64), *states[h]]
        for (P, S), token, key, value in zip(pairwise(path), tokens, k[h], v[h], strict=True):
            assert distance(S, minimiser(table4.retnet, P, replace(token, k=key, x=value, gamma=gamma))) <= FLOAT32


def test_mamba2_line_is_retnets():
    """`|S - gamma P|^2 - 2 <S^T k, x>`, as Gated DeltaNet's Table 1 (arXiv 2412.06464) prints it, differs by a constant."""
    P, (token,) = problem(T=1)

    def difference(S):
        other = table4.square(S - token.gamma * P) - 2 * (S.mT @ token.k).dot(token.x)
        return table4.retnet(S, P, token) - other

    values = [difference(torch.randn_like(P)).item() for _ in range(5)]
    constant = (token.gamma * (1 - token.gamma) * table4.square(P)).item()
    assert values == pytest.approx([constant] * 5, rel=1e-12)


@pytest.mark.parametrize('K', [2, 16, 64])
def test_diagonal_is_not_the_minimiser(K):
    """It is off by `eps k_j` times what the other entries of the channel recall, in each entry j."""
    P, tokens = problem(K=K, T=5, norm2=4.0)
    for token in tokens:
        S, best = table4.op_longhorn(P, token), minimiser(longhorn, P, token)
        others = P.mT @ token.k - token.k[:, None] * P
        torch.testing.assert_close(S - best, torch.outer(token.k, token.eps) * others, rtol=1e-9, atol=1e-12)
        # far beyond rounding
        assert distance(S, best) > 1e-3 and missed(longhorn, S, best, P, token) > 1e-3
        P = S


def test_diagonal_is_further_off_with_larger_keys():
    P, (token,) = problem(K=16, T=1)
    sizes = [0.01, 0.1, 1.0, 10.0, 100.0]
    tokens = [replace(token, k=size * token.k) for size in sizes]
    far = [distance(table4.op_longhorn(P, t), minimiser(longhorn, P, t)) for t in tokens]
    assert far == sorted(far) and far[0] < 1e-3 < 1e-2 < far[-1]


def test_diagonal_is_the_minimiser_where_entries_do_not_meet():
    assert {row['case'] for row in measure_agreement()} == {'K = 1', 'keys with one entry that is not 0', 'a zero state'}
    for row in measure_agreement():
        assert row['distance'] <= FLOAT64, row


@pytest.mark.parametrize('exact', [False, True])
@pytest.mark.parametrize('K', [1, 2, 16])
def test_a_pair_written_again_and_again(K, exact):
    """The exact update ends with a recall of the input, the diagonal one with K times it, whatever the key."""
    generator = torch.Generator().manual_seed(2)
    k = (0.5 + torch.rand(K, generator=generator, dtype=torch.float64)).expand(1, 4000, 1, K)
    x = torch.tensor([3.0, -2.0], dtype=torch.float64).expand(1, 4000, 1, 2)
    o, _ = naive_recurrent_longhorn(k, k, x, torch.full_like(x, 0.5), exact=exact)
    torch.testing.assert_close(o[0, -1, 0], x[0, 0, 0] * (1 if exact else K), rtol=1e-9, atol=0)


@pytest.mark.parametrize('name', [row.name for row in VARIANTS if row.name not in EXACT])
def test_other_versions_disagree(name):
    updates, ops = distances(ROWS[name], *problem(name, T=20, norm2=0.9))
    assert min(updates) > 1e-3 and min(ops) > 1e-3


def test_griffins_factor():
    """Griffin's own factor √(1 - α²) is the table's √(1 - α) times √(1 + α)."""
    P, (token,) = problem('Griffin', T=1)
    written, own = (op(torch.zeros_like(P), token).double() for op in (table4.op_griffin, table4.op_rglru))
    torch.testing.assert_close(own / written, (1 + token.a).sqrt()[None], rtol=FLOAT32, atol=0)


def test_a_minus_before_the_loss_has_no_minimum_for_large_keys():
    P, (token,) = problem(T=1)
    token = replace(token, beta=torch.full_like(token.beta, 0.5))
    # beta |k|^2 just below and above 1
    for factor in (1.9, 2.1):
        sized = replace(token, k=factor ** 0.5 * token.k / token.k.norm())
        if factor < 2:
            S = minimiser(table4.longhorn_minus, P, sized)
            assert distance(table4.update_exact(P, sized), S) > 0.1
        else:
            with pytest.raises(torch.linalg.LinAlgError):
                minimiser(table4.longhorn_minus, P, sized)
