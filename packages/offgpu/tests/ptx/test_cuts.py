"""A token's bits in compiled kernels do not depend on how its sequence is cut: training equals decoding."""

from __future__ import annotations

import pytest
import torch

from fla_longhorn.ops import fused_recurrent_longhorn, longhorn_state_update
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from offgpu.emulator import Emulator
from packages.offgpu.tests.ptx.calls import BF16, Call
from packages.offgpu.tests.ptx.execute import as_on_a_gpu

T = 5
CASES = [
    Case(B=2, T=T, H=1, K=16, V=64, D=True, z=True, sigmoid=True),
    Case(B=1, T=T, H=1, K=64, V=64, dtype=BF16, g='channel', D=True),
    Case(B=1, T=T, H=2, K=17, V=33, state_v_first=True, g='head', scalar_beta=True, D=True, z=True, sigmoid=True),
    Case(B=1, T=T, H=1, K=128, V=64, dtype=BF16, z=True),
]


def part_of(inputs, start, stop):
    return {name: x if name == 'D' else x[:, start:stop] for name, x in inputs.items()}


def with_states(inputs, states, options):
    """One token through the kernel for many: `longhorn_state_update` has a kernel of its own for the diagonal update."""
    o, final_state, _ = fused_recurrent_longhorn(
        **inputs, **options, initial_state=states, output_final_state=True, return_intermediate_states=True,
    )
    states.copy_(final_state)
    return o


def in_place(inputs, states, options):
    return longhorn_state_update(states, **inputs, **options)


@pytest.mark.parametrize(('case', 'exact'), [
    *(pytest.param(x, True, id=f'exact-{x}', marks=[] if x is CASES[2] else pytest.mark.slow) for x in CASES),
    *(pytest.param(x, False, id=f'diagonal-{x}', marks=[] if x is CASES[1] else pytest.mark.slow) for x in CASES[:2]),
])
def test_training_and_decoding_have_the_same_bits(case, exact):
    decode = in_place if exact else with_states
    inputs, options = make_inputs(case), make_options(case, exact=exact)
    del options['output_final_state']
    with as_on_a_gpu(Call('cut', case)), Emulator('sm_90', races=False).active():
        trained, last = fused_recurrent_longhorn(**inputs, **options, output_final_state=True)
        assert trained.requires_grad
        with torch.no_grad():
            states, outputs = torch.zeros_like(last), []
            for start, stop in [(0, 2), *((t, t + 1) for t in range(2, T))]:
                outputs.append(decode(part_of(inputs, start, stop), states, options))
    assert torch.equal(torch.cat(outputs, 1), trained)
    assert torch.equal(states, last)
