"""The compiled loops read and write bfloat16 as it lies, with the results of float32 rounded once."""

import pytest
import torch
from numba import njit

from fla_kit.numba import memory, simd
from fla_kit.numba.memory import BITS, array_at
from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn_cpu import backend as numba
from fla_longhorn_cpu import wide
from tests.ops.cases import run


def converter(W, load_lanes, store_lanes):
    @njit
    def convert(source, target, n, source_bits, target_bits):
        x, y = array_at(source, n, source_bits), array_at(target, n, target_bits)
        for i in range(0, n, W):
            store_lanes(y, i, load_lanes(x, i, n - i), n - i)

    def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=dtype)
        convert(x.data_ptr(), y.data_ptr(), len(x), BITS[x.dtype], BITS[dtype])
        return y
    return converted


@pytest.fixture(scope='module', params=[(simd, memory), (wide, wide)], ids=['narrow', 'wide'])
def converted(request):
    width, way = request.param
    return converter(width.W, way.load_lanes, way.store_lanes)


def test_every_value_is_widened(converted):
    # one more than whole vectors
    x = torch.arange(2**16 + 1, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    torch.testing.assert_close(converted(x, torch.float32), x.float(), rtol=0, atol=0, equal_nan=True)


def test_rounding_is_that_of_torch(converted):
    bits = torch.randint(-2**31, 2**31 - 1, (2**18 + 3,), dtype=torch.int32)
    # halfway between two values; NaN of which only the lowest bits are set; the largest number, and infinity
    bits[::2] = bits[::2] & ~0xffff | 0x8000
    bits[:4] = torch.tensor([0x7f800001, 0x7f7fffff, 0x7f800000, 1])
    x = bits.view(torch.float32)
    torch.testing.assert_close(converted(x, torch.bfloat16), x.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize('scalar_beta', [False, True])
@pytest.mark.parametrize('beta_dtype', [torch.bfloat16, torch.float32], ids=str)
def test_the_way_changes_nothing(monkeypatch, exact, scalar_beta, beta_dtype):
    case = Case(
        T=70, K=5, V=40, dtype=torch.bfloat16, scalar_beta=scalar_beta, sigmoid=True, D=True, z=True, initial_state=True,
    )
    inputs, options = make_inputs(case), make_options(case, exact=exact)
    inputs['beta'] = inputs['beta'].detach().to(beta_dtype).requires_grad_()
    asked = []
    common = numba.common_dtype
    monkeypatch.setattr(numba, 'common_dtype', lambda *tensors: asked.append(common(*tensors)) or asked[-1])
    direct = run(chunk_longhorn, inputs, options)
    assert set(asked) == {beta_dtype}
    monkeypatch.setattr(numba, 'common_dtype', lambda *_: torch.float32)
    widened = run(chunk_longhorn, inputs, options)
    for name, x in direct.items():
        assert x.dtype == widened[name].dtype and torch.equal(x, widened[name]), name
