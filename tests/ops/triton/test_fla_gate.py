"""fla's kernels of the gated delta rule against the exact update with a decay and one step size per head."""

from __future__ import annotations

import pytest
import torch

from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING
from tests.ops.cases import TOLERANCE, reference, run

if INTERPRETING:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.gated_oja_rule import fused_recurrent_gated_oja_rule

    def step(k, beta):
        return beta / (1 + beta * k.square().sum(-1))

    @pytest.mark.parametrize('g', ['head', 'channel'])
    def test_decoding(g):
        """Its `g` and `gv` are decays of the state before the step, as ours; Oja's rule takes another step."""
        case = Case(B=1, T=12, H=2, K=4, V=8, scalar_beta=True, g=g)
        inputs = {name: x.detach() for name, x in make_inputs(case).items()}
        q, k, v, beta, decays = (inputs[name] for name in ('q', 'k', 'v', 'beta', 'g'))
        o, _ = naive_recurrent_longhorn(**inputs, exact=True)
        name = 'g' if g == 'head' else 'gv'
        found, _ = fused_recurrent_gated_delta_rule(q, k, v, beta=step(k, beta), scale=1.0, **{name: decays})
        assert relative_error(found, o) < 1e-6
        if g == 'channel':
            of_oja, _ = fused_recurrent_gated_oja_rule(q, k, v, gv=decays, beta=step(k, beta), scale=1.0)
            assert relative_error(of_oja, o) > 0.1

    @pytest.mark.usefixtures('interpreted_fla')
    def test_chunks():
        """Outputs and gradients in float16, on keys as they are."""
        case = Case(B=1, T=70, H=1, K=32, V=32, scalar_beta=True, g='head', initial_state=True, dtype=torch.float16)
        inputs, options = make_inputs(case), {'exact': True, 'output_final_state': True}

        def through_fla(q, k, v, beta, g, initial_state, exact, output_final_state):
            eps = step(k.float(), beta.float()).to(k.dtype)
            return chunk_gated_delta_rule(
                q, k, v, g, eps, scale=1.0, initial_state=initial_state, output_final_state=output_final_state,
            )

        got, expected = run(through_fla, inputs, options), reference(inputs, options)
        errors = {name: relative_error(got[name], x) for name, x in expected.items()}
        assert max(errors.values()) < TOLERANCE[case.dtype][0], errors
