"""The float64 reference of a case by the naive op, and the comparison of every output and gradient."""

from __future__ import annotations

import torch

from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING, slow_but

# where Triton's kernels run, if anywhere
TRITON_DEVICE = 'cpu' if INTERPRETING else 'cuda' if torch.cuda.is_available() else None

# the bounds on |a - ref| / |ref|: (outputs, gradients)
TOLERANCE = {
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (5e-3, 5e-3),
    torch.float16: (5e-3, 5e-3),
}


def interpreted(few: tuple[int, ...], *cases) -> list:
    """The cases, of which only these `few` are not slow where kernels are interpreted."""
    return slow_but((cases[i] for i in few) if INTERPRETING else cases, cases)


def run(op, inputs: dict[str, torch.Tensor], options: dict, seed: int = 1, dtype: torch.dtype | None = None) -> dict:
    """Outputs and, for a random gradient of both, the gradients of all inputs; that of the first is rounded to `dtype`."""
    for x in inputs.values():
        x.grad = None
    o, final_state = op(**inputs, **options)
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(o.shape, generator=generator).to(dtype or o.dtype).to(o)
    dht = torch.randn(final_state.shape, generator=generator).to(final_state)
    torch.autograd.backward((o, final_state), (do, dht))
    return {'o': o.detach(), 'final_state': final_state.detach(), **{f'd{name}': x.grad for name, x in inputs.items()}}


def reference(inputs: dict[str, torch.Tensor], options: dict, seed: int = 1) -> dict[str, torch.Tensor]:
    """The naive op in float64 on the very numbers that the op under test is given, and the same output gradients."""
    doubles = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    return run(naive_recurrent_longhorn, doubles, options, seed, inputs['v'].dtype)


def assert_close(
    got: dict[str, torch.Tensor], ref: dict[str, torch.Tensor], dtype: torch.dtype, factor: int = 1,
) -> None:
    """Within `factor` times the bounds of the dtype."""
    outputs, gradients = (factor * bound for bound in TOLERANCE[dtype])
    errors = {name: relative_error(got[name], ref[name]) for name in ref}
    bounds = {name: outputs if name in ('o', 'final_state') else gradients for name in ref}
    off = {name: f'{error:.2e} > {bounds[name]:.0e}' for name, error in errors.items() if not error <= bounds[name]}
    assert not off, off


def check(op, case: Case, device: torch.device | str = 'cpu', exact: bool = False) -> dict[str, torch.Tensor]:
    """Run `op` on a case and compare all it returns with the reference, dtypes included."""
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    got = run(op, inputs, options)
    assert got['o'].dtype == inputs['v'].dtype
    assert got['final_state'].dtype == torch.float32
    for name, x in inputs.items():
        assert got[f'd{name}'].dtype == x.dtype, name
    # the doubled exact step forgets less of what rounding left: 2.1 times at most where it was measured
    factor = 2 if exact and case.allow_neg_eigval and case.dtype != torch.float32 else 1
    assert_close(got, reference(inputs, options), case.dtype, factor)
    return got
