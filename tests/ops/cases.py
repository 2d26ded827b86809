"""The float64 reference of a case by the naive op, and the comparison of every output and gradient."""

from __future__ import annotations

from typing import Any

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

ALL: dict[str, Any] = dict(D=True, z=True, initial_state=True)
DOUBLED: dict[str, Any] = dict(K=17, V=3, dtype=torch.bfloat16, scale=0.5, allow_neg_eigval=True, **ALL)
# by file or folder of `fla_longhorn/ops/triton`: conditions that few shapes meet, each with the smallest case that does. Those
# of segments are in `triton/test_segments.py`, those of the exact update split along the sequence in `test_exact.py`
BRANCHES = {
    'slots.py': {
        'more slots than a sequence fills': Case(H=1, K=4, V=3, initial_state=True).packed(31, 2),
        'and a decay per head': Case(H=1, K=4, V=3, g='head', initial_state=True).packed(31, 2),
        'and one per channel': Case(H=1, K=4, V=3, g='channel', initial_state=True).packed(31, 2),
        'one packed sequence': Case(H=1, K=4, V=3, z=True).packed(33),
    },
    'diagonal': {
        'more programs than run at a time': Case(B=33, T=2, H=1, K=1, V=1, **ALL),
        'two blocks of K': Case(B=1, T=3, H=1, K=17, V=3),
        'and one decay, two tokens at a time': Case(B=1, T=3, H=1, K=17, V=3, g='channel', **ALL),
        'and one step': Case(B=1, T=3, H=1, K=17, V=3, scalar_beta=True, **ALL),
        'and pairs of tokens in bfloat16': Case(B=1, T=3, H=1, K=17, V=3, sigmoid=True, dtype=torch.bfloat16, **ALL),
        'more than four blocks of channels': Case(B=1, T=2, H=1, K=1, V=129, scalar_beta=True),
        'keys of 128': Case(B=1, T=2, H=1, K=65, V=17, z=True),
    },
    'exact': {
        'blocks of K': Case(B=1, T=17, H=1, K=65, V=3, **ALL),
        'and one step and decay': Case(B=1, T=17, H=1, K=65, V=3, scalar_beta=True, g='head', **ALL),
        'and a decay per channel': Case(B=1, T=17, H=1, K=65, V=3, g='channel', z=True),
        'sequences that fill spans, a decay per head': Case(B=2, T=32, H=1, K=4, V=3, g='head'),
        'a decay per channel': Case(B=2, T=32, H=1, K=4, V=3, g='channel', D=True),
        'in bfloat16': Case(B=2, T=64, H=1, K=4, V=3, g='head', dtype=torch.bfloat16, z=True),
        'a scale in bfloat16': Case(B=1, T=35, H=1, K=4, V=12, scale=0.5, dtype=torch.bfloat16, z=True),
        'all in bfloat16': Case(B=1, T=35, H=2, layout='apart', **DOUBLED),
        'and logits': Case(B=1, T=40, H=2, g='head', sigmoid=True, **DOUBLED),
        'and a decay in float16': Case(B=1, T=9, H=1, K=4, V=3, scale=0.5, g='channel', dtype=torch.float16, **ALL),
        'logits of one step': Case(B=1, T=17, H=1, K=4, V=3, scalar_beta=True, sigmoid=True, g='channel'),
        'blocks of channels and a decay per channel': Case(B=1, T=17, H=1, K=4, V=65, g='channel', z=True),
        'and one decay': Case(B=1, T=17, H=1, K=4, V=65, g='head', scalar_beta=True),
    },
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
