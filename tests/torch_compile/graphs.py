"""What the tests of compilation share: compiling with a count of the graphs, and comparing with eager."""

from collections.abc import Callable, Iterable

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config

from fla_longhorn.selfcheck.compare import relative_error

# the C++ compiler's time is most of a test's: kernels without vectors and optimisation say as much
cheap_kernels = config.patch({'cpp.simdlen': 1, 'aot_inductor.debug_compile': True})


def compiled(function: Callable, backend: str = 'aot_eager', **options) -> tuple[Callable, CompileCounterWithBackend]:
    """Compile with `fullgraph=True`, from a clean slate; `counter.frame_count` counts the graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def gradients(loss: torch.Tensor, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    named = dict(named)
    return dict(zip(named, torch.autograd.grad(loss, named.values()), strict=True))


def read(conv_state: torch.Tensor) -> torch.Tensor:
    """What a convolution reads of its state: all but the oldest column, whose gradient fla's CUDA kernel drops."""
    return conv_state[..., 1:]


def weighted(*outputs: torch.Tensor) -> torch.Tensor:
    """A scalar that weighs every entry of the outputs differently."""
    return sum((x.float() * torch.linspace(-1, 2, x.numel(), device=x.device).view_as(x)).sum() for x in outputs)


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    """Of the same names, shapes and dtypes, with relative errors up to `tolerance`."""
    assert got.keys() == expected.keys()
    assert all(got[name].dtype == x.dtype and got[name].shape == x.shape for name, x in expected.items())
    errors = {name: relative_error(got[name], x) for name, x in expected.items()}
    assert max(errors.values()) <= tolerance, errors
