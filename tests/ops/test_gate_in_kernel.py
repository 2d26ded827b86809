"""fla's gate in the kernel, `use_gate_in_kernel`: the formulas of its references, their gradients, and errors."""

import math

import pytest
import torch
from fla.ops.gated_delta_rule.gate import naive_gdn_gate
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate

from fla_longhorn.ops import (
    chunk_longhorn,
    fused_recurrent_longhorn,
    longhorn_state_update,
    naive_recurrent_longhorn,
)
from fla_longhorn.selfcheck.case import Case, make_inputs
from fla_longhorn.selfcheck.compare import relative_error

B, T, H, V = 2, 9, 2, 6
OPS = [chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn]
# A_log, dt_bias, lower_bound
GIVEN = [(True, True, None), (True, False, None), (True, True, -5.), (False, True, -5.), (True, False, -2)]


def gate(kind, device, A_log=True, dt_bias=True, lower_bound=None, dtype=torch.float32):
    """`g` and the options of a gate in the kernel, with leaf tensors."""
    generator = torch.Generator().manual_seed(2)
    shape = (B, T, H) if kind == 'head' else (B, T, H, V)

    def draw(*size):
        return torch.randn(*size, generator=generator).to(device, dtype).requires_grad_()

    given = {'g': draw(*shape), 'use_gate_in_kernel': True}
    if A_log:
        given['A_log'] = draw(H)
    if dt_bias:
        given['dt_bias'] = draw(math.prod(shape[2:]))
    return given if lower_bound is None else given | {'lower_bound': lower_bound}


def of_fla(g, use_gate_in_kernel, A_log=None, dt_bias=None, lower_bound=None):
    """fla's own reference."""
    if lower_bound is not None:
        y = g[..., None] if g.dim() == 3 else g
        return naive_kda_lowerbound_gate(y, A_log, dt_bias, lower_bound, output_dtype=g.dtype).view_as(g)
    return (naive_gdn_gate if g.dim() == 3 else naive_kda_gate)(g, A_log, dt_bias, output_dtype=g.dtype)


@pytest.mark.parametrize('given', GIVEN, ids=str)
@pytest.mark.parametrize('kind', ['head', 'channel'])
@pytest.mark.parametrize('op', OPS)
def test_equals_the_references_of_fla(op, kind, given, device):
    """Outputs and all gradients, those of the gate's parameters among them."""
    case = Case(B=B, T=T, H=H, K=4, V=V, initial_state=True)
    results = []
    for decays in (lambda **x: x, lambda **x: {'g': of_fla(**x)}):
        inputs, options = make_inputs(case, device), gate(kind, device, *given)
        o, state = op(**inputs, **decays(**options), output_final_state=True)
        leaves = [x for x in (inputs | options).values() if isinstance(x, torch.Tensor)]
        results.append((o, state, *torch.autograd.grad(o.square().sum() + state.square().sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert relative_error(x, y) < 1e-6


@pytest.mark.parametrize('dt_bias', [True, False])
@pytest.mark.parametrize('kind', ['head', 'channel'])
def test_low_precision(kind, dt_bias, device):
    """A projection in bfloat16 becomes decays in float32, so each gradient has its input's dtype."""
    inputs = make_inputs(Case(B=B, T=T, H=H, K=4, V=V), device)
    options = gate(kind, device, dt_bias=dt_bias, dtype=torch.bfloat16)
    o, _ = chunk_longhorn(**inputs, **options)
    wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    assert torch.equal(o, chunk_longhorn(**inputs, **wide)[0])
    o.sum().backward()
    assert {x.grad.dtype for x in options.values() if isinstance(x, torch.Tensor)} == {torch.bfloat16}


@pytest.mark.parametrize(('kind', 'change', 'error', 'message'), [
    ('head', dict(use_gate_in_kernel=1), TypeError, 'use_gate_in_kernel must be True or False, got int'),
    ('head', dict(use_gate_in_kernel=False), ValueError, 'A_log must be None without use_gate_in_kernel=True, got Parameter'),
    ('head', dict(g=None), ValueError, 'g must be what the gate is computed from with use_gate_in_kernel=True, got None'),
    ('head', dict(g=torch.zeros(B, T)), ValueError, r'g must have shape \[B, T, H\] or \[B, T, H, V\], got \[2, 9\]'),
    ('head', dict(g=torch.zeros(B, T, 1)), ValueError, r'A_log must have shape \[H\] for the g given, here \[1\], got \[2\]'),
    ('head', dict(A_log=None), ValueError, 'A_log must be given with use_gate_in_kernel=True unless lower_bound is'),
    ('head', dict(A_log=1.), TypeError, 'A_log must be a torch.Tensor, got float'),
    ('head', dict(A_log=torch.zeros(H, dtype=torch.int64)), TypeError, 'A_log must be float16, bfloat16 or float32'),
    ('head', dict(A_log=torch.zeros(H).double()), TypeError, 'A_log must be .* got float64'),
    ('head', dict(dt_bias=torch.zeros(H * V)), ValueError, r'dt_bias must have shape \[H\] for the g given, here \[2\]'),
    ('channel', dict(dt_bias=torch.zeros(H)), ValueError, r'dt_bias must have shape \[H \* V\] for the g given, here \[12\]'),
    ('channel', dict(dt_bias=torch.zeros(H, V)), ValueError, r'dt_bias must have shape \[H \* V\]'),
    ('head', dict(lower_bound=True), TypeError, 'lower_bound must be a number or None, got bool'),
    ('head', dict(lower_bound=0.), ValueError, 'lower_bound must be finite and below 0, got 0.0'),
    ('head', dict(lower_bound=-float('inf')), ValueError, 'lower_bound must be finite and below 0, got -inf'),
], ids=str)
def test_errors(kind, change, error, message):
    inputs = {name: x.detach() for name, x in make_inputs(Case(B=B, T=T, H=H, K=4, V=V)).items()}
    options = {
        name: torch.nn.Parameter(x.detach()) if name == 'A_log' else x for name, x in gate(kind, 'cpu').items()
    }
    for op in OPS:
        if op is not naive_recurrent_longhorn or 'float64' not in message:
            with pytest.raises(error, match=message):
                op(**inputs, **options | change)
    with pytest.raises(error, match=message):
        longhorn_state_update(torch.zeros(B, H, 4, V), **inputs, **options | change)


def test_transformed(device):
    """The parameters of a gate in forward mode, against backward's gradient."""
    inputs = {name: x.detach() for name, x in make_inputs(Case(B=1, T=T, H=H, K=4, V=V), device).items()}
    options = gate('channel', device)
    options['g'] = options['g'][:1].detach()

    def loss(A_log):
        return chunk_longhorn(**inputs, **options | {'A_log': A_log})[0].square().sum()

    dA_log, = torch.autograd.grad(loss(options['A_log']), options['A_log'])
    assert relative_error(torch.func.jacfwd(loss)(options['A_log'].detach()), dA_log) < 1e-5
