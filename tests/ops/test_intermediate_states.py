"""The states between, of every backend, against those of the naive op in float64."""

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, naive_recurrent_longhorn
from tests.conftest import INTERPRETING
from tests.ops.cases import Case, make_inputs, make_options, relative_error

BATCH = 1 if INTERPRETING else 2

pytestmark = pytest.mark.usefixtures('backend', 'poison')


@pytest.mark.parametrize('op', [chunk_longhorn, fused_recurrent_longhorn], ids=['chunk', 'fused_recurrent'])
@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
@pytest.mark.parametrize('case', [
    Case(B=BATCH, T=70, K=4, V=5, initial_state=True),
    Case(B=BATCH, T=64, K=4, V=5, scalar_beta=True, state_v_first=True),
    Case(K=4, V=5, initial_state=True).packed(32, 0, 70, 1),
], ids=str)
def test_intermediate_states(op, exact, case, device):
    """Those before every 32nd token of each sequence, the first one's among them."""
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    with pytest.raises(ValueError, match='return_intermediate_states must be False where an input needs a gradient'):
        op(**inputs, **options, return_intermediate_states=True)
    inputs = {name: x.detach() for name, x in inputs.items()}
    o, final_state, states = op(**inputs, **options, return_intermediate_states=True)
    assert torch.equal(o, op(**inputs, **options)[0])
    want = naive_recurrent_longhorn(
        **{name: x.double() for name, x in inputs.items()}, **options, return_intermediate_states=True,
    )
    assert states.shape == want[2].shape and relative_error(states, want[2]) <= 1e-5
    assert relative_error(final_state, want[1]) <= 1e-5
