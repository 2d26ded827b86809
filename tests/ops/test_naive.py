"""The oracle itself: against the paper's algorithm, finite differences and the normal equations of the exact step."""

import pytest
import torch

from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options


def algorithm_1(x, q, k, beta, S):
    """The paper's Algorithm 1 (arXiv 2407.14207) for one head: x, beta [B, L, d], q, k [B, L, m], S [B, d, m]."""
    outputs = []
    for t in range(x.shape[1]):
        x_t, q_t, k_t, beta_t = x[:, t], q[:, t], k[:, t], beta[:, t]
        epsilon_t = beta_t / (1 + beta_t * torch.einsum('bm,bm->b', k_t, k_t)[:, None])
        A_t = 1 - torch.einsum('bd,bm->bdm', epsilon_t, k_t * k_t)
        B_t = torch.einsum('bd,bm->bdm', epsilon_t * x_t, k_t)
        S = A_t * S + B_t
        outputs.append(torch.einsum('bdm,bm->bd', S, q_t))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize('scalar_beta', [False, True])
def test_is_algorithm_1(scalar_beta):
    case = Case(B=3, T=19, H=1, K=5, V=7, scalar_beta=scalar_beta, initial_state=True)
    inputs = {name: x.detach().double() for name, x in make_inputs(case).items()}
    o, state = naive_recurrent_longhorn(**inputs, output_final_state=True)
    x, q, k, beta = (inputs[name].squeeze(2) for name in ('v', 'q', 'k', 'beta'))
    beta = beta[..., None].expand_as(x) if scalar_beta else beta
    expected, S = algorithm_1(x, q, k, beta, inputs['initial_state'].squeeze(1).mT)
    torch.testing.assert_close(o.squeeze(2), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.squeeze(1), S.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('exact', [False, True])
def test_a_doubled_step_is_that_of_another_beta(exact):
    """`2 beta / (1 + beta |k|^2)` is the step of `2 beta / (1 - beta |k|^2)`, also where that is negative."""
    inputs = {name: x.detach().double() for name, x in make_inputs(Case(B=2, T=9, H=2, K=4, V=6, initial_state=True)).items()}
    beta = inputs['beta']
    other = 2 * beta / (1 - beta * inputs['k'].square().sum(-1, keepdim=True))
    assert (other < 0).any() and (other > 0).any()
    got, expected = (
        naive_recurrent_longhorn(**inputs | more, exact=exact, output_final_state=True)
        for more in (dict(allow_neg_eigval=True), dict(beta=other))
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


CASES = [
    Case(B=2, T=4, H=2, K=3, V=2, initial_state=True),
    Case(B=1, T=4, H=1, K=2, V=3, scalar_beta=True, D=True, z=True, sigmoid=True, scale=0.5, initial_state=True),
    Case(H=1, K=2, V=2, D=True, z=True, initial_state=True, state_v_first=True).packed(2, 0, 3),
    Case(B=1, T=4, H=1, K=2, V=3, sigmoid=True, initial_state=True, allow_neg_eigval=True),
]


@pytest.mark.parametrize('case', CASES, ids=str)
def test_gradcheck(case, exact):
    inputs, options = make_inputs(case), make_options(case, exact=exact)
    names = list(inputs)
    values = [x.detach().double().requires_grad_() for x in inputs.values()]

    def op(*values):
        return naive_recurrent_longhorn(**dict(zip(names, values, strict=True)), **options)

    assert torch.autograd.gradcheck(op, values)


def objective(S, previous, k, v, beta):
    """The paper's Eq. 5, `|S - S_{t-1}|_F^2 + |S^T k_t - v_t|^2_{diag(beta_t)}`, for `[H, K, V]` states."""
    recalled = torch.einsum('hkv,hk->hv', S, k)
    return (S - previous).square().sum() + (beta * (recalled - v).square()).sum()


@pytest.mark.parametrize('size', [0.0, 0.3, 1.0, 30.0])
@pytest.mark.parametrize('scalar_beta', [False, True])
def test_exact_is_the_minimiser(scalar_beta, size):
    """One exact step solves Eq. 5's normal equations, where its gradient is zero and its Hessian positive."""
    case = Case(B=1, T=1, H=2, K=5, V=7, scalar_beta=scalar_beta, initial_state=True)
    inputs = {name: x.detach().double() for name, x in make_inputs(case).items()}
    inputs['k'] *= size
    k, v, beta, previous = inputs['k'][0, 0], inputs['v'][0, 0], inputs['beta'][0, 0], inputs['initial_state'][0]
    beta = beta[:, None].expand_as(v) if scalar_beta else beta
    S = naive_recurrent_longhorn(**inputs, exact=True, output_final_state=True)[1][0].requires_grad_()

    loss = objective(S, previous, k, v, beta)
    gradient, = torch.autograd.grad(loss, S)
    assert gradient.abs().max() <= 1e-12 * (1 + size ** 2)
    # (I + beta_v k k^T) s_v = s_v' + beta_v v_v k, for each channel v on its own
    A = torch.eye(5, dtype=torch.float64) + torch.einsum('hv,hi,hj->hvij', beta, k, k)
    b = previous.mT + torch.einsum('hv,hv,hk->hvk', beta, v, k)
    torch.testing.assert_close(S.detach().mT, torch.linalg.solve(A, b), rtol=1e-9, atol=1e-11)
    assert torch.linalg.eigvalsh(A).min() >= 1 - 1e-9
    # the diagonal update is another point, unless there is nothing to learn
    diagonal = naive_recurrent_longhorn(**inputs, output_final_state=True)[1][0]
    excess = objective(diagonal, previous, k, v, beta) - loss.detach()
    assert excess > 1e-3 if size else excess == 0
