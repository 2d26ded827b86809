"""One step a head as GLA and as the delta rule: the translation, with a plain float64 loop in the place of fla's kernels."""

from __future__ import annotations

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, scalar_beta
from tests.ops.cases import Case, assert_close, check, make_inputs, make_options, reference, run

CASES = [
    Case(B=2, T=19, H=2, K=5, V=7, scalar_beta=True, initial_state=True),
    Case(B=1, T=11, H=1, K=4, V=6, scalar_beta=True, sigmoid=True, D=True, z=True, initial_state=True, state_v_first=True,
         scale=0.3),
    Case(H=1, K=3, V=4, scalar_beta=True, z=True, initial_state=True).packed(3, 0, 5),
]


def sequences(cu_seqlens, T):
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def loop(step):
    """An op with fla's signature whose state takes `step(S, k, v, x)` at each token."""
    def op(q, k, v, x, scale, initial_state, output_final_state, cu_seqlens):
        outputs, states = [], []
        for i, (bos, eos) in enumerate(sequences(cu_seqlens, q.shape[1])):
            S = initial_state.double() if cu_seqlens is None else initial_state[i:i + 1].double()
            for t in range(bos, eos):
                S = step(S, k[:, t, :, :, None], v[:, t, :, None], x[:, t])
                outputs.append(scale * (q[:, t, :, :, None] * S).sum(-2))
            states.append(S)
        return torch.stack(outputs, 1), torch.cat(states) if output_final_state else None
    return op


def gla(S, k, v, g):
    return g.exp()[..., None] * S + k * v


def delta_rule(S, k, v, beta):
    return S + k * (beta[..., None, None] * (v - (k * S).sum(-2, keepdim=True)))


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
@pytest.mark.parametrize('case', CASES, ids=str)
def test_translation(case, exact, monkeypatch):
    monkeypatch.setattr('fla.ops.gla.chunk_gla', loop(gla))
    monkeypatch.setattr('fla.ops.delta_rule.chunk_delta_rule', loop(delta_rule))
    inputs, options = make_inputs(case), make_options(case, exact=exact)
    ref = reference(inputs, options)

    def op(D=None, z=None, initial_state=None, **rest):
        rest['use_beta_sigmoid'] = rest.pop('use_beta_sigmoid_in_kernel')
        return scalar_beta.chunk_scalar_beta(
            D=D, z=z, initial_state=initial_state, cu_seqlens=rest.pop('cu_seqlens', None), **rest,
        )

    assert_close(run(op, {name: x.detach().double().requires_grad_() for name, x in inputs.items()}, options), ref, case.dtype)


def test_no_cancellation():
    """`1 - eps k^2` keeps its digits where it is near 0, down to one entry a key."""
    for k in (torch.tensor([[[[1e4, 0.0]]]]), torch.tensor([[[[3e3]]]])):
        beta = torch.full(k.shape[:3], 0.5)
        eps, log_decay = scalar_beta.steps(k, beta, False)
        exact_eps, exact_decay = scalar_beta.steps(k.double(), beta.double(), False)
        torch.testing.assert_close(eps.double(), exact_eps, rtol=1e-6, atol=0)
        torch.testing.assert_close(log_decay.double(), exact_decay, rtol=1e-6, atol=1e-6)
        k, beta = k.double(), beta.double()[..., None]
        naive = torch.log1p(-beta / (1 + beta * k.square().sum(-1, keepdim=True)) * k.square())
        torch.testing.assert_close(exact_decay, naive, rtol=1e-6, atol=1e-9)


def test_only_where_asked_for(monkeypatch):
    """The CPU and float32 have no such kernels, and nothing goes there unless it is asked to."""
    inputs = make_inputs(CASES[0])
    tensors = [inputs[name] for name in ('q', 'k', 'v', 'beta')]
    assert not scalar_beta.applies(*tensors)
    monkeypatch.setenv('FLA_LONGHORN_SCALAR_BETA', 'fla')
    assert not scalar_beta.applies(*tensors)
    meta = [x.to('meta', torch.bfloat16) for x in tensors]
    assert not scalar_beta.applies(*meta)


if torch.cuda.is_available():
    @pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
    @pytest.mark.parametrize('K', [16, 64, 128])
    def test_kernels(exact, K, monkeypatch):
        monkeypatch.setenv('FLA_LONGHORN_SCALAR_BETA', 'fla')
        case = Case(B=2, T=300, H=2, K=K, V=64, dtype=torch.bfloat16, scalar_beta=True, initial_state=True)
        check(chunk_longhorn, case, 'cuda', exact)
