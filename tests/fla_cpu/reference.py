"""Plain float64 formulas of what fla's fused modules compute, and how far from them a result may be."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

OUTPUT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float64: 1e-12}
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float64: 1e-12}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """`|got - want| / |want|`; zero where both are zero."""
    distance, size = (got.double() - want.double()).norm().item(), want.double().norm().item()
    if size > 0:
        return distance / size
    return 0.0 if distance == 0 else float('inf')


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape, f'{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}'
    off = error(got, want)
    assert off <= tolerance, f'{name}: relative error {off:.3e}, tolerance {tolerance:.3e}'


def double(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach().double().requires_grad_(x.requires_grad)


def evaluate(
    function: Callable,
    inputs: dict[str, torch.Tensor | None],
    seeds: list[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """The outputs and, by name, the gradients of the inputs that require one, for the outputs' gradients `seeds`."""
    outputs = function(**inputs)
    names = [name for name, x in inputs.items() if x is not None and x.requires_grad]
    while len(seeds) < len(outputs):
        seeds.append(torch.randn_like(outputs[len(seeds)]))
    gradients = torch.autograd.grad(
        outputs, [inputs[name] for name in names], [seed.to(y) for seed, y in zip(seeds, outputs, strict=True)],
    )
    return outputs, dict(zip(names, gradients, strict=True))


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
    seeds = []
    outputs, gradients = evaluate(function, inputs, seeds)
    wanted, expected = evaluate(reference, {name: double(x) for name, x in inputs.items()}, seeds)
    rounded, rounded_gradients = evaluate(reference, inputs, seeds) if plain else (wanted, expected)

    for i, (got, want, other) in enumerate(zip(outputs, wanted, rounded, strict=True)):
        assert_close(f'output {i}', got, want, max(OUTPUT_TOLERANCE[dtype], 2 * error(other, want)))
    for name, want in expected.items():
        assert gradients[name].dtype == inputs[name].dtype
        tolerance = max(GRADIENT_TOLERANCE[dtype], 2 * error(rounded_gradients[name], want))
        assert_close(f'gradient of {name}', gradients[name], want, tolerance)


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
