"""The calls to check: inputs and options from sizes and flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
OPS = ('chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update')


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; `lengths` are those of packed sequences, and sum to T."""

    name: str
    B: int = 2
    T: int = 67
    H: int = 2
    K: int = 16
    V: int = 48
    scalar_beta: bool = False
    sigmoid: bool = False
    D: bool = False
    z: bool = False
    initial_state: bool = True
    state_v_first: bool = False
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    strided: bool = False
    allow_neg_eigval: bool = False

    def packed(self, *lengths: int) -> Case:
        return replace(self, B=1, T=sum(lengths), lengths=lengths)


CASES = (
    Case('as in the model', B=2, T=130, H=1, V=96, sigmoid=True, D=True, z=True, initial_state=False),
    Case('vector beta'),
    Case('scalar beta', scalar_beta=True),
    Case('beta logits', sigmoid=True, scale=0.5),
    # at K = 16, the exact form rounds more than these bounds in 16 bits
    Case('doubled steps', K=64, sigmoid=True, allow_neg_eigval=True),
    Case('D', D=True),
    Case('z', z=True),
    Case('state [V, K]', state_v_first=True, D=True, z=True),
    Case('packed', D=True, z=True, sigmoid=True).packed(1, 40, 0, 33, 17),
    Case('odd sizes, strided', B=3, T=31, H=3, K=5, V=7, scalar_beta=True, strided=True),
    Case('K = 1', T=19, K=1, V=33),
    Case('K = 128', B=1, T=70, H=1, K=128, V=40, z=True),
    Case('one token', T=1, sigmoid=True, D=True, z=True),
    # long and narrow: on a GPU, chunk_longhorn splits the sequence into segments
    Case('long', B=1, T=1100, H=1, K=16, V=33, sigmoid=True, D=True, z=True),
    Case('long, packed', H=1, K=8, V=32, state_v_first=True).packed(515, 7, 700),
)
QUICK = ('as in the model', 'scalar beta', 'packed', 'odd sizes, strided', 'long')
# longest call of longhorn_state_update, which is for decoding
UPDATE_TOKENS = 4


def cases_of(op: str, quick: bool) -> list[Case]:
    """The cases for `op`."""
    cases = [case for case in CASES if not quick or case.name in QUICK]
    if op != 'longhorn_state_update':
        return cases
    # it takes no sequences of different lengths
    short = [replace(case, T=min(case.T, UPDATE_TOKENS)) for case in cases if case.lengths is None]
    return list({replace(case, name=''): case for case in short}.values())


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Leaf tensors by argument name, standard normal, `beta` in (0, 1) or its logits; the same in every run."""
    generator = torch.Generator('cpu').manual_seed(0)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    N = B if case.lengths is None else len(case.lengths)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device='cpu').to(dtype)

    beta = draw(B, T, H) if case.scalar_beta else draw(B, T, H, V)
    inputs = {
        'q': draw(B, T, H, K), 'k': draw(B, T, H, K), 'v': draw(B, T, H, V),
        'beta': beta if case.sigmoid else beta.float().sigmoid().to(dtype),
    }
    if case.initial_state:
        inputs['initial_state'] = draw(*((N, H, V, K) if case.state_v_first else (N, H, K, V)), dtype=torch.float32)
    if case.D:
        inputs['D'] = draw(H, V)
    if case.z:
        inputs['z'] = draw(B, T, H, V)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    for name in ('q', 'k', 'v', 'z') if case.strided else ():
        if name in inputs:
            # every other element of a larger tensor
            inputs[name] = torch.stack([inputs[name], torch.full_like(inputs[name], float('nan'))], -1)[..., 0]
    return {name: x.requires_grad_() for name, x in inputs.items()}


def make_options(case: Case, device: torch.device, exact: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        'scale': case.scale, 'use_beta_sigmoid_in_kernel': case.sigmoid, 'state_v_first': case.state_v_first, 'exact': exact,
        'allow_neg_eigval': case.allow_neg_eigval,
    }
    if case.lengths is not None:
        options['cu_seqlens'] = torch.tensor([0, *case.lengths], dtype=torch.int64, device='cpu').cumsum(0).to(device)
    return options
