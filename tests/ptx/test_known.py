"""The emulator itself: small kernels come out right, and wrong ones are found."""

from __future__ import annotations

import pytest

from tests.ptx.known import KERNELS, check


@pytest.mark.parametrize('name', list(KERNELS))
def test_small_kernels(name):
    assert check(name, 'sm_90', 'together') == ''


@pytest.mark.parametrize('order', ['first', 'last'])
@pytest.mark.parametrize('name', ['matmul(32, 64, 64, bfloat16, \'tf32\', 4)', 'column_sum(200, 4)'])
def test_orders_of_warps(name, order):
    assert check(name, 'sm_90', order) == ''


@pytest.mark.parametrize('name', ['matmul(32, 64, 64, bfloat16, \'tf32\', 4)', 'softmax(1000, float32, 4)'])
def test_ampere(name):
    assert check(name, 'sm_80', 'together') == ''
