"""The models of the comparison of gates."""

import pytest
import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.kda.gate import naive_kda_gate
from fla.ops.kda.naive import naive_recurrent_kda
from torch.nn.functional import softplus

from fla_longhorn.selfcheck.compare import relative_error
from lab.experiments import chunkwise


@pytest.mark.parametrize('T', [5, 37])
@pytest.mark.parametrize('mixer', ['Gated DeltaNet', 'KDA'])
def test_operators_of_layers(mixer, T):
    """With what fla's layers pass, beside fla's loops: outputs and gradients, of the gate's parameters too."""
    torch.manual_seed(0)
    kda = mixer == 'KDA'
    q, k, v, beta = torch.randn(2, T, 2, 4), torch.randn(2, T, 2, 4), torch.randn(2, T, 2, 6), torch.randn(2, T, 2)
    g, dt_bias = (torch.randn(2, T, 2, 4), torch.randn(8)) if kda else (torch.randn(2, T, 2), torch.randn(2))
    inputs = [q, k, v, g, beta, torch.randn(2), dt_bias]

    def op(q, k, v, g, beta, A_log, dt_bias):
        return chunkwise.chunk_gated_delta_rule(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=None, output_final_state=False,
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True,
        )

    def loop(q, k, v, g, beta, A_log, dt_bias):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        if kda:
            return naive_recurrent_kda(q, k, v, naive_kda_gate(g, A_log, dt_bias), beta.sigmoid())
        return naive_recurrent_gated_delta_rule(q, k, v, beta.sigmoid(), -A_log.exp() * softplus(g + dt_bias))

    do, found = torch.randn(2, T, 2, 6), []
    for function in (op, loop):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, _ = function(*leaves)
        found.append((o, *torch.autograd.grad(o, leaves, do)))
    # dA_log is a sum with cancellation, and the loops are in float32 too
    for name, x, y in zip(('o', 'dq', 'dk', 'dv', 'dg', 'dbeta', 'dA_log', 'ddt_bias'), *found, strict=True):
        assert relative_error(x, y) < (1e-6 if name == 'o' else 2e-5), name
