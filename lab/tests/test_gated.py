"""The models of the comparison of gates."""

import numpy as np
import pytest
import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.kda.gate import naive_kda_gate
from fla.ops.kda.naive import naive_recurrent_kda
from torch.nn.functional import softplus

from fla_longhorn.selfcheck.compare import relative_error
from lab.experiments import chunkwise, gated, mqar, recall, synthetic

CELL = mqar.DEFAULTS | {'hidden_size': 32, 'num_hidden_layers': 2, 'state_size': 8, 'initializer_range': 0.02}


@pytest.mark.parametrize('T', [5, 37])
@pytest.mark.parametrize('mixer', ['Gated DeltaNet', 'KDA', mqar.SCALAR_GATED])
def test_operators_of_layers(mixer, T):
    """With what fla's layers pass, beside fla's loops: outputs and gradients, of the gate's parameters too."""
    torch.manual_seed(0)
    kda, scalar = mixer == 'KDA', mixer == mqar.SCALAR_GATED
    q, k, v, beta = torch.randn(2, T, 2, 4), torch.randn(2, T, 2, 4), torch.randn(2, T, 2, 6), torch.randn(2, T, 2)
    g, dt_bias = (torch.randn(2, T, 2, 4), torch.randn(8)) if kda else (torch.randn(2, T, 2), torch.randn(2))
    inputs = [q, k, v, g, beta, torch.randn(2), dt_bias]

    def op(q, k, v, g, beta, A_log, dt_bias):
        function = gated.chunk_scalar_longhorn if scalar else chunkwise.chunk_gated_delta_rule
        return function(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, initial_state=None, output_final_state=False,
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True,
        )

    def loop(q, k, v, g, beta, A_log, dt_bias):
        step = 1 / ((-beta).exp() + 1 + k.square().sum(-1)) if scalar else beta.sigmoid()
        if not scalar:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        if kda:
            return naive_recurrent_kda(q, k, v, naive_kda_gate(g, A_log, dt_bias), step)
        return naive_recurrent_gated_delta_rule(q, k, v, step, -A_log.exp() * softplus(g + dt_bias))

    do, found = torch.randn(2, T, 2, 6), []
    for function in (op, loop):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, _ = function(*leaves)
        found.append((o, *torch.autograd.grad(o, leaves, do)))
    # dA_log is a sum with cancellation, and the loops are in float32 too
    for name, x, y in zip(('o', 'dq', 'dk', 'dv', 'dg', 'dbeta', 'dA_log', 'ddt_bias'), *found, strict=True):
        assert relative_error(x, y) < (1e-6 if name == 'o' else 2e-5), name


@pytest.mark.parametrize('gate', ['head', 'channel'])
def test_the_gate_of_the_results(gate):
    """At the start the layer's gate is what the published runs had: `-softplus(W x + dt_bias)`, on weights drawn alike."""
    task = mqar.MQAR(vocab_size=64, seq_len=32, num_pairs=4)
    torch.manual_seed(0)
    layer = mqar.build_model(CELL | {'mixer': 'gated exact', 'gate': gate, 'doubled': False}, task).model.layers[0].attn
    x = torch.randn(2, 5, 64)
    found = layer.gate(x)
    g = -softplus(x @ layer.gate.down.weight.T @ layer.gate.up.weight.T + layer.gate.dt_bias)
    assert relative_error(found, g.view_as(found)) < 1e-6
    # a head's other projection has two numbers
    assert 0.015 < layer.gate.down.weight.std() < 0.025


def test_segments():
    """A segment asks each of its keys once, for its value there, and as many others; keys come again with other values."""
    tokens, targets = synthetic.segments(np.random.default_rng(0), 40, 4 * 15, vocab_size=22, num_pairs=4, absent=2)
    again = old = 0
    for row, target in zip(tokens.reshape(40, 4, 15), targets.reshape(40, 4, 15), strict=True):
        earlier = {}
        for part, answers in zip(row, target, strict=True):
            assert part[0] == 20 and (answers[:9] == synthetic.IGNORE).all() and (answers[9:] != synthetic.IGNORE).all()
            values = dict(zip(part[1:9:2], part[2:9:2], strict=True))
            assert len(values) == 4 and max(values) < 10 <= min(values.values()) and max(values.values()) < 20
            asked = dict(zip(part[9:], answers[9:], strict=True))
            assert len(asked) == 6 and {key: value for key, value in asked.items() if value != 21} == values
            again += sum(earlier.get(key, value) != value for key, value in values.items())
            old += sum(key in earlier for key, value in asked.items() if value == 21)
            earlier |= values
    assert again > 40 and old > 40
    with pytest.raises(ValueError, match='seq_len must be a multiple of 15'):
        synthetic.segments(np.random.default_rng(0), 2, 50, vocab_size=22, num_pairs=4, absent=2)


def test_panels_with_and_without_a_gate(tmp_path):
    """`null` is a gate of the grid, as names are, so panels have no order of their own."""
    runs = [
        {'cell': {'mixer': 'gated exact', 'gate': gate, 'doubled': doubled, 'seed': 0}, 'recall': 0.5, 'history': [[1, 0.5]]}
        for gate in ('head', None) for doubled in (True, False)
    ]
    setting = {'title': 'Gates', 'plot': {'x': 'step', 'panels': ['gate', 'doubled']}}
    recall.draw({'setting': setting, 'runs': runs}, tmp_path / 'results.png')
    assert (tmp_path / 'results.png').read_bytes().startswith(b'\x89PNG')
