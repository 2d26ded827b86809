"""One case of the ops: inputs, the float64 reference by the naive op, and the comparison of every output and gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fla_longhorn.ops import naive_recurrent_longhorn
from fla_longhorn.selfcheck.compare import relative_error

# the bounds on |a - ref| / |ref|: (outputs, gradients)
TOLERANCE = {
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (5e-3, 5e-3),
    torch.float16: (5e-3, 5e-3),
}


@dataclass(frozen=True)
class Case:
    B: int = 2
    T: int = 33
    H: int = 2
    K: int = 16
    V: int = 20
    dtype: torch.dtype = torch.float32
    scalar_beta: bool = False
    sigmoid: bool = False
    D: bool = False
    z: bool = False
    initial_state: bool = False
    state_v_first: bool = False
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    allow_neg_eigval: bool = False
    # 'head' or 'channel', and the least logarithm of a decay
    g: str | None = None
    lowest: float = -2.

    def __str__(self) -> str:
        default = Case()
        parts = [f'{n}{getattr(self, n)}' for n in 'BTHKV']
        parts += [str(self.dtype).removeprefix('torch.')] if self.dtype != default.dtype else []
        for name in ('scalar_beta', 'sigmoid', 'D', 'z', 'initial_state', 'state_v_first', 'allow_neg_eigval'):
            parts += [name] if getattr(self, name) else []
        parts += [f'g_{self.g}{self.lowest}'] if self.g else []
        parts += [f'scale{self.scale}'] if self.scale is not None else []
        parts += ['lengths' + '+'.join(map(str, self.lengths))] if self.lengths is not None else []
        return '-'.join(parts)

    def packed(self, *lengths: int) -> Case:
        return replace(self, B=1, T=sum(lengths), lengths=lengths)


def make_inputs(case: Case, device: torch.device | str = 'cpu', seed: int = 0) -> dict[str, torch.Tensor]:
    """Leaf tensors by the ops' argument names, standard normal keys and queries, `beta` over (0, 1) or its logits."""
    generator = torch.Generator().manual_seed(seed)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V

    def draw(*shape, dtype=case.dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    beta = draw(B, T, H) if case.scalar_beta else draw(B, T, H, V)
    inputs = {
        'q': draw(B, T, H, K),
        'k': draw(B, T, H, K),
        'v': draw(B, T, H, V),
        'beta': beta if case.sigmoid else beta.float().sigmoid().to(case.dtype),
    }
    N = B if case.lengths is None else len(case.lengths)
    if case.initial_state:
        shape = (N, H, V, K) if case.state_v_first else (N, H, K, V)
        inputs['initial_state'] = draw(*shape, dtype=torch.float32)
    if case.D:
        inputs['D'] = draw(H, V)
    if case.z:
        inputs['z'] = draw(B, T, H, V)
    if case.g:
        shape = (B, T, H) if case.g == 'head' else (B, T, H, V)
        inputs['g'] = (case.lowest * torch.rand(*shape, generator=generator)).to(case.dtype)
    return {name: x.to(device).requires_grad_() for name, x in inputs.items()}


def make_options(case: Case, device: torch.device | str = 'cpu', exact: bool = False) -> dict:
    options = {
        'scale': case.scale,
        'use_beta_sigmoid_in_kernel': case.sigmoid,
        'state_v_first': case.state_v_first,
        'output_final_state': True,
        'exact': exact,
        'allow_neg_eigval': case.allow_neg_eigval,
    }
    if case.lengths is not None:
        options['cu_seqlens'] = torch.tensor([0, *case.lengths]).cumsum(0).to(device)
    return options


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
