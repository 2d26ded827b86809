"""What makes a call not plain, in every thread by itself."""

import threading
from contextlib import nullcontext

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fla_longhorn.ops import chunk_longhorn
from fla_longhorn.ops.plain import is_plain
from fla_longhorn.selfcheck.case import Case, make_inputs


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_mode_is_seen_after_another_threads_has_ended(device):
    entered, leave = threading.Event(), threading.Event()

    def other():
        with Dispatches():
            entered.set()
            assert leave.wait(30)

    x = torch.ones(1, device=device)
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(30) and is_plain(x)
    with Dispatches():
        leave.set()
        thread.join()
        assert not is_plain(x)
    assert is_plain(x)


def test_what_is_plain(device):
    x = torch.ones(2, device=device)
    assert not is_plain(x)
    with torch.no_grad():
        assert is_plain(x, None, torch.nn.Parameter(x))
        assert not is_plain(x.to('meta')) and not is_plain(x, 1) and not is_plain(torch.complex(x, x).conj().imag)
        assert not is_plain(torch.Tensor._make_subclass(type('Own', (torch.Tensor,), {}), x))
        for mode in (Functions(), Dispatches(), torch._subclasses.FakeTensorMode(), torch.autograd.forward_ad.dual_level()):
            with mode:
                assert not is_plain(x)
        assert torch.func.vmap(lambda y: y * float(is_plain(y)))(x).sum() == 0
        assert torch.jit.trace(lambda y: y * float(is_plain(x)), (x,), check_trace=False)(x).sum() == 0
        assert torch.compile(lambda y: y * float(is_plain(y)), backend='eager', fullgraph=True)(x).sum() == 0


@pytest.mark.parametrize('exact', [False, True], ids=['diagonal', 'exact'])
def test_backward_under_a_mode_and_autocast(exact, backend, device):
    """A counter of operations, or a profiler, sees the call; it changes no bit."""
    inputs, found = make_inputs(Case(K=4, z=True, D=True, g='head'), device), []
    for mode in (nullcontext(), Dispatches(), torch.autocast(device.type, torch.bfloat16)):
        with mode:
            o = chunk_longhorn(**inputs, exact=exact)[0]
            found.append((o, *torch.autograd.grad(o.square().sum(), list(inputs.values()))))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))
