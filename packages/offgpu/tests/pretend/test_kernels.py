"""Longhorn's own kernels on the device's memory, interpreted: launches, their buffers and their outputs are on the device.

What they compute is tested in `tests/ops`, which runs other kernels in their place where it must be fast.
"""

import pytest
import torch

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn
from fla_longhorn.selfcheck.case import Case
from tests.ops.cases import check
from tests.ops.test_pool import DECODE, INDICES, Call

pytestmark = pytest.mark.usefixtures('kernels')
OPS = {'chunk': chunk_longhorn, 'fused_recurrent': fused_recurrent_longhorn}
ALL = dict(H=1, K=4, V=8, D=True, z=True, initial_state=True, sigmoid=True)
CASES = {
    'options': Case(B=1, T=70, **ALL),
    'packed': Case(**ALL, state_v_first=True, scale=0.5).packed(40, 0, 27),
    'scalar': Case(B=1, T=70, H=2, K=4, V=4, scalar_beta=True),
    'float16': Case(B=1, T=66, H=1, K=4, V=4, dtype=torch.float16, initial_state=True),
    'token': Case(B=2, T=1, **ALL),
    'segments': Case(B=1, T=600, H=1, K=1, V=4),
}


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
@pytest.mark.parametrize('op, case', [
    *(('chunk', case) for case in CASES), ('fused_recurrent', 'options'), ('fused_recurrent', 'packed'),
])
def test_ops(op, case, exact):
    got = check(OPS[op], CASES[case], 'cuda', exact)
    assert all(x.is_cuda for x in got.values())


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_a_token_in_a_pool(exact):
    Call(DECODE, exact, INDICES['everything'], torch.int64, torch.device('cuda')).check()
