"""Plain float64 formulas of what fla's fused modules compute, and how far from them a result may be."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fla_longhorn.selfcheck.compare import relative_error

OUTPUT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float64: 1e-12}
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float64: 1e-12}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    off = relative_error(got, want)
    assert off <= tolerance, f'{name}: relative error {off:.3e}, tolerance {tolerance:.3e}'


def evaluate(function: Callable, inputs: dict[str, torch.Tensor | None], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The outputs and, for random gradients of them in this dtype, the gradients of the inputs that require one."""
    outputs = function(**inputs)
    leaves = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(y.shape, generator=generator).to(dtype).to(y) for y in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
    return {
        **{f'output {i}': y.detach() for i, y in enumerate(outputs)},
        **{f'gradient of {name}': dx for name, dx in zip(leaves, gradients, strict=True)},
    }


def compare(
    function: Callable,
    reference: Callable,
    inputs: dict[str, torch.Tensor | None],
    dtype: torch.dtype,
    plain: bool = False,
) -> None:
    """Compare all outputs, and the gradients of all inputs for a random gradient of every output.

    Both functions take `inputs` as keyword arguments, the reference in float64, and return a tuple of tensors. With `plain`,
    an error up to twice that of the reference in the dtype of the inputs is allowed too.
    """
    doubles = {name: x if x is None else x.detach().double().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    got, want = evaluate(function, inputs, dtype), evaluate(reference, doubles, dtype)
    rounded = evaluate(reference, inputs, dtype) if plain else want
    assert got.keys() == want.keys()
    for name, x in want.items():
        tolerance = (OUTPUT_TOLERANCE if name.startswith('output') else GRADIENT_TOLERANCE)[dtype]
        assert_close(name, got[name], x, max(tolerance, 2 * relative_error(rounded[name], x)))


def strided(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> torch.Tensor:
    """A random leaf tensor that is every row of a wider one, as a slice of a fused projection is."""
    base = torch.randn(*shape[:-1], 2 * shape[-1] + 3, dtype=dtype)
    x = base[..., 1:1 + shape[-1]]
    assert not x.is_contiguous()
    return x.detach().requires_grad_(requires_grad)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def norm(x, weight=None, bias=None, eps=1e-5, is_rms_norm=False, num_groups=1):
    """Layer, RMS or group normalisation over the last dimension."""
    rows = x.unflatten(-1, (num_groups, -1))
    if not is_rms_norm:
        rows = rows - rows.mean(-1, keepdim=True)
    y = (rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def convolve(x, weight, bias=None, residual=None, state=None, activation=None):
    """One sequence `[T, D]` after a state `[D, W]`; return the output and the state after it."""
    D, W = weight.shape
    past = x.new_zeros(D, W) if state is None else state
    stream = torch.cat([past.t(), x])
    y = sum(stream[1 + i:1 + i + len(x)] * weight[:, i] for i in range(W))
    y = y if bias is None else y + bias
    y = y if activation is None else F.silu(y)
    return y if residual is None else y + residual, stream[len(x):].t()
