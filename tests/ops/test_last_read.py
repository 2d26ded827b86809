"""The memory of the device tensor that was read last; the fake is a CPU tensor that says it is on a device."""

import pytest
import torch

from fla_longhorn.ops.last_read import LastRead


class OnDevice(torch.Tensor):
    """Counts how often its values are read."""

    reads = 0
    device = torch.device('cuda')

    def tolist(self):
        OnDevice.reads += 1
        return super().tolist()


def on_device(values) -> OnDevice:
    OnDevice.reads = 0
    return torch.tensor(values).as_subclass(OnDevice)


@pytest.mark.parametrize('other', [[1, 2], [1, 2, 3], [7]], ids=['equal', 'longer', 'one'])
def test_another_live_tensor(other):
    """Weak references to live tensors compare elementwise, which raises for two masks of a batch."""
    x, last = on_device([1, 2]), LastRead()
    assert last.values(x) == [1, 2]
    y = on_device(other)
    assert last.values(y) == other and OnDevice.reads == 1


def test_read_once_unless_changed():
    x, last = on_device([0, 5]), LastRead()
    assert last.values(x) == last.values(x) == [0, 5] and OnDevice.reads == 1
    x[1] = 6
    assert last.values(x) == [0, 6] and OnDevice.reads == 2
    # a new tensor in the memory of one that is gone
    del x
    assert last.values(on_device([0, 7])) == [0, 7]


def test_memory_of_the_host_is_read_each_time():
    x, last = torch.tensor([0, 5]), LastRead()
    last.values(x)
    x.numpy()[1] = 6
    assert last.values(x) == [0, 6]
