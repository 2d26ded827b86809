"""The memory of the device tensor that was read last, on CPU tensors: it needs no device."""

import pytest
import torch

from fla_longhorn.ops.last_read import LastRead


@pytest.mark.parametrize('other', [torch.ones(2, 8), torch.ones(2, 9), torch.ones(1)], ids=['equal', 'longer', 'one'])
def test_another_live_tensor(other):
    """Weak references to live tensors compare elementwise, which raises for two masks of a batch."""
    x, last = torch.ones(2, 8), LastRead()
    assert not last.is_still(x)
    last.note(x)
    assert last.is_still(x) and not last.is_still(other)


def test_what_a_reading_depends_on():
    x, last = torch.zeros(3), LastRead()
    last.note(x, 8)
    assert last.is_still(x, 8) and not last.is_still(x, 9)
    x[0] = 1
    assert not last.is_still(x, 8)


def test_tensor_is_gone():
    x, last = torch.ones(3), LastRead()
    last.note(x)
    x = torch.ones(3)
    assert not last.is_still(x)
