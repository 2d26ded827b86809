"""Calls of the operators: inputs and options from sizes and flags, as tests and benchmarks take them too; those to check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call but `exact`, since each case is for both updates."""

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
    final_state: bool = True
    state_v_first: bool = False
    scale: float | None = None
    # the packed sequences have these, which sum to T
    lengths: tuple[int, ...] | None = None
    allow_neg_eigval: bool = False
    disable_recompute: bool = False
    # 'head' or 'channel', and the least logarithm of a decay
    g: str | None = None
    lowest: float = -0.2
    # q, k, v, z and, if it is 'shifted', beta have it: 'dense' or one of LAYOUTS
    layout: str = 'dense'
    # inputs that have another dtype, and which
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()

    def __str__(self) -> str:
        """The sizes, and what else differs from the defaults."""
        found = [(x.name, getattr(self, x.name), x.default) for x in fields(self)]
        told = ((name, '' if x is True else str(x)) for name, x, default in found if name in 'BTHKV' or x != default)
        return '-'.join(name + x.removeprefix('torch.') for name, x in told)

    def packed(self, *lengths: int) -> Case:
        return replace(self, B=1, T=sum(lengths), lengths=lengths)


FLAGS = tuple(field.name for field in fields(Case) if field.type == 'bool')
# inputs of several dtypes in one call
MIXED = (('k', torch.float16), ('v', torch.float32), ('D', torch.float32))
# the same numbers in a larger tensor of NaN: every other element, heads of a wider projection, not aligned to 16 bytes
LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'strided': lambda x, nan: torch.stack([x, nan], -1)[..., 0],
    'view': lambda x, nan: torch.cat([nan, x], 2)[:, :, nan.shape[2]:],
    # and tokens of z further apart than those of v
    'apart': lambda x, nan: torch.cat([nan, x], 2)[:, :, nan.shape[2]:],
    'shifted': lambda x, nan: torch.cat([nan.flatten()[:1], x.flatten()])[1:].view(x.shape),
}


def make_inputs(case: Case, device: torch.device | str = 'cpu', seed: int = 0) -> dict[str, Tensor]:
    """Leaf tensors by the operators' argument names: standard normal, `beta` in (0, 1) or its logits, `g` uniform.

    A seed's numbers are the same on every device; on 'meta' nothing is drawn.
    """
    kind: dict[str, Any] = dict(dtype=torch.float32, device='meta' if torch.device(device).type == 'meta' else 'cpu')
    generator = torch.Generator('cpu').manual_seed(seed)
    B, T, H, K, V = case.B, case.T, case.H, case.K, case.V
    N = B if case.lengths is None else len(case.lengths)

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, **kind).to(dtype)

    beta = draw(B, T, H) if case.scalar_beta else draw(B, T, H, V)
    inputs = {
        'q': draw(B, T, H, K), 'k': draw(B, T, H, K), 'v': draw(B, T, H, V),
        'beta': beta if case.sigmoid else beta.float().sigmoid().to(case.dtype),
    }
    if case.initial_state:
        inputs['initial_state'] = draw(*((N, H, V, K) if case.state_v_first else (N, H, K, V)), dtype=torch.float32)
    if case.D:
        inputs['D'] = draw(H, V)
    if case.z:
        inputs['z'] = draw(B, T, H, V)
    if case.g:
        g = torch.rand(*((B, T, H) if case.g == 'head' else (B, T, H, V)), generator=generator, **kind)
        inputs['g'] = (case.lowest * g).to(case.dtype)
    inputs = {name: x.to(device, dict(case.dtypes).get(name, x.dtype)) for name, x in inputs.items()}
    if case.layout != 'dense':
        names = {*inputs} & {'q', 'k', 'v', 'z', *(['beta'] if case.layout == 'shifted' else [])}
        gaps = {x: torch.full_like(inputs[x], float('nan')) for x in names}
        if case.z and case.layout == 'apart':
            gaps['z'] = torch.cat([gaps['z']] * 2, 2)
        inputs |= {x: LAYOUTS[case.layout](inputs[x], gap) for x, gap in gaps.items()}
    return {name: x.requires_grad_() for name, x in inputs.items()}


def make_options(case: Case, device: torch.device | str = 'cpu', exact: bool = False) -> dict[str, Any]:
    """The other arguments of the operators."""
    options: dict[str, Any] = {
        'scale': case.scale, 'use_beta_sigmoid_in_kernel': case.sigmoid, 'state_v_first': case.state_v_first,
        'output_final_state': case.final_state, 'exact': exact, 'allow_neg_eigval': case.allow_neg_eigval,
    }
    if case.disable_recompute:
        options['disable_recompute'] = True
    if case.lengths is not None:
        options['cu_seqlens'] = torch.tensor([0, *case.lengths], dtype=torch.int64, device='cpu').cumsum(0).to(device)
    return options


OPS = ('chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update')
_case = partial(Case, T=67, V=48, initial_state=True)
CASES = {
    'as in the model': _case(B=2, T=130, H=1, V=96, sigmoid=True, D=True, z=True, initial_state=False),
    'vector beta': _case(),
    'scalar beta': _case(scalar_beta=True),
    'beta logits': _case(sigmoid=True, scale=0.5),
    # at K = 16, the exact form rounds more than these bounds in 16 bits
    'doubled steps': _case(K=64, sigmoid=True, allow_neg_eigval=True),
    'doubled steps, packed': _case(K=64, sigmoid=True, allow_neg_eigval=True).packed(33, 0, 40),
    'gate per head': _case(g='head', sigmoid=True, D=True, z=True),
    'gate per channel': _case(g='channel', sigmoid=True, D=True, z=True),
    'gate per head, packed': _case(g='head', scalar_beta=True, lowest=-8.0).packed(1, 40, 0, 33, 17),
    'gate per channel, packed': _case(g='channel', lowest=-8.0, D=True, z=True).packed(1, 40, 0, 33, 17),
    'gate per channel, doubled steps': _case(g='channel', K=64, sigmoid=True, allow_neg_eigval=True),
    'updates kept': _case(K=32, sigmoid=True, D=True, z=True, disable_recompute=True),
    'updates kept, packed': _case(K=64, g='head', disable_recompute=True).packed(1, 40, 0, 33, 17),
    'D': _case(D=True),
    'z': _case(z=True),
    'state [V, K]': _case(state_v_first=True, D=True, z=True),
    'packed': _case(D=True, z=True, sigmoid=True).packed(1, 40, 0, 33, 17),
    'odd sizes, strided': _case(B=3, T=31, H=3, K=5, V=7, scalar_beta=True, layout='strided'),
    'K = 1': _case(T=19, K=1, V=33),
    'K = 128': _case(B=1, T=70, H=1, K=128, V=40, z=True),
    'one token': _case(T=1, sigmoid=True, D=True, z=True),
    # long and narrow: on a GPU, chunk_longhorn splits the sequence into segments
    'long': _case(B=1, T=1100, H=1, K=16, V=33, sigmoid=True, D=True, z=True),
    'long, packed': _case(H=1, K=8, V=32, state_v_first=True).packed(515, 7, 700),
}
QUICK = (
    'as in the model', 'scalar beta', 'doubled steps', 'gate per head', 'gate per channel', 'packed',
    'gate per channel, packed', 'updates kept', 'odd sizes, strided', 'K = 128', 'long',
)
# longest call of longhorn_state_update, which is for decoding
UPDATE_TOKENS = 4


def cases_of(op: str, quick: bool) -> dict[str, Case]:
    """The cases for `op`, by name."""
    cases = {name: case for name, case in CASES.items() if not quick or name in QUICK}
    if op != 'longhorn_state_update':
        return cases
    # it takes no sequences of different lengths, and those that only differ in T become one
    dense = {name: replace(case, disable_recompute=False) for name, case in cases.items() if case.lengths is None}
    short = {replace(case, T=min(case.T, UPDATE_TOKENS)): name for name, case in dense.items()}
    return {name: case for case, name in short.items()}
