"""The operators and the shapes to measure, as data.

Shape letters: B sequences, T tokens, H heads, K entries of a key, V channels of a head, C = H * V channels in all. The state
has K * V * H entries. An operator is one row of `OPERATORS`; a new one needs its inputs, its reference and its arithmetic.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from benchmarks.ops import references


@dataclass(frozen=True)
class Shape:
    B: int
    T: int
    H: int
    K: int
    V: int

    @property
    def C(self) -> int:
        return self.H * self.V

    @property
    def state(self) -> int:
        return self.K * self.V * self.H

    def __str__(self) -> str:
        return ' '.join(f'{name}={getattr(self, name)}' for name in 'BTHKV')


@dataclass(frozen=True)
class Input:
    """A random input: `dims` in shape letters (1 for a broadcast one), `make` applied to standard normal numbers."""

    dims: str
    make: Callable[[torch.Tensor], torch.Tensor] | None = None
    dtype: torch.dtype | None = None

    def draw(self, shape: Shape, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        sizes = [1 if dim == '1' else getattr(shape, dim) for dim in self.dims]
        x = torch.randn(sizes, generator=generator, device=device)
        return (x if self.make is None else self.make(x)).to(self.dtype or dtype).requires_grad_()


@dataclass(frozen=True)
class Operator:
    """How to call an operator, its reference result and its least work.

    `fma` are the multiply-adds per state entry and token, forward and backward (including recomputed states). On a GPU they
    count for the floor only if `matrix` is off: tensor cores compute matrix products at another rate.
    """

    name: str
    backend: str
    device: str
    function: str
    inputs: dict[str, Input]
    reference: Callable[..., torch.Tensor]
    fma: tuple[int, int]
    matrix: bool = False
    output: str = 'BTHV'
    options: dict = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    # longest sequences for slow operators, which would take minutes
    max_tokens: int | None = None
    # the operator's own heads with an equally large state
    equal_state: Callable[[Shape], Shape] = lambda shape: shape

    def load(self) -> Callable:
        module, name = self.function.split(':')
        return getattr(importlib.import_module(module), name)


def normalized(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=-1)


def step_size(x: torch.Tensor) -> torch.Tensor:
    return F.softplus(x - 3)


def negative(x: torch.Tensor) -> torch.Tensor:
    return -x.exp()


def square_heads(shape: Shape) -> Shape:
    """The largest possible K = V, at most 128."""
    K = next(K for K in (128, 64, 32, 16, 8, 4, 2, 1) if shape.state % K**2 == 0)
    return replace(shape, H=shape.state // K**2, K=K, V=K)


def mamba2_heads(shape: Shape) -> Shape:
    V = next(V for V in (64, 32, 16, 8, 4, 2, 1) if shape.state % (2 * V * V) == 0 or V == 1)
    K = next(K for K in (128, 64, 32, 16, 8, 4, 2, 1) if shape.state % (K * V) == 0)
    return replace(shape, H=shape.state // (K * V), K=K, V=V)


def one_head(shape: Shape) -> Shape:
    return replace(shape, H=1, V=shape.C)


def no_keys(shape: Shape) -> Shape:
    return replace(shape, H=1, K=1, V=shape.state)


Q, V = Input('BTHK'), Input('BTHV')
UNIT = Input('BTHK', normalized)
STEP, STEPS = Input('BTH', torch.sigmoid), Input('BTHV', torch.sigmoid)
DECAY, DECAYS = Input('BTH', F.logsigmoid), Input('BTHK', F.logsigmoid)
RATES = Input('CK', negative, torch.float32)


def longhorn(
    name: str, backend: str, device: str, exact: bool, scalar: bool, variables: dict[str, str],
    module: str = 'fla_longhorn.ops', **fields,
) -> Operator:
    # diagonal: k eps, v - k S, S and o; with one step size per head, the channels share the decay 1 - eps k^2
    fma = (3, 8) if exact else (2, 5) if scalar else (4, 12)
    return Operator(
        name=name + ' exact' * exact + ' scalar' * scalar, backend=backend, device=device,
        function=f'{module}:{name}', inputs=dict(q=Q, k=Q, v=V, beta=STEP if scalar else STEPS),
        reference=references.longhorn(exact), fma=fma, matrix=exact or scalar, options=dict(exact=exact),
        environment=variables, **fields,
    )


def longhorn_rows() -> list[Operator]:
    ops = ('chunk_longhorn', 'fused_recurrent_longhorn')
    variants = [(exact, scalar) for exact in (False, True) for scalar in (False, True)]
    rows = []
    for name, backend, device in (
        *((name, 'triton', 'cuda') for name in ops), *((name, 'numba', 'cpu') for name in ops), (ops[0], 'torch', 'cpu'),
    ):
        variables = {'FLA_LONGHORN_BACKEND': backend}
        rows += [longhorn(name, backend, device, *variant, variables) for variant in variants]
    # fla's own kernels take one step size per head
    rows += [
        longhorn('chunk_longhorn_by_fla', "fla's kernels", 'cuda', exact, True, {}, 'fla_longhorn_extras.scalar_beta')
        for exact in (False, True)
    ]
    return rows + [longhorn('naive_recurrent_longhorn', 'naive', 'cpu', *variant, {}, max_tokens=512) for variant in variants]


def fla(name: str, module: str, inputs: dict, reference: Callable, fma: tuple[int, int], **fields) -> Operator:
    fields = dict(backend='triton', device='cuda', matrix=True, equal_state=square_heads) | fields
    return Operator(name=name, function=f'fla.ops.{module}:{name}', inputs=inputs, reference=reference, fma=fma, **fields)


def fla_naive(name: str, module: str, inputs: dict, reference: Callable, fma: tuple[int, int], **fields) -> Operator:
    return fla(name, f'{module}.naive', inputs, reference, fma, **dict(backend='naive', device='cpu', max_tokens=512) | fields)


SCAN = dict(u=Input('BCT'), delta=Input('BCT', step_size), A=RATES, B=Input('BKT'), C=Input('BKT'))
SCAN2 = dict(x=V, dt=Input('BTH', step_size), A=Input('H', negative, torch.float32), B=Input('BT1K'), C=Input('BT1K'))
GATED = dict(q=UNIT, k=UNIT, v=V, g=DECAY, beta=STEP)
KDA = GATED | dict(g=DECAYS)
HEAD_FIRST = dict(q=Input('BHTK'), k=Input('BHTK', normalized), v=Input('BHTV'))


def renamed(inputs: dict[str, Input], **names: str) -> dict[str, Input]:
    return {names.get(name, name): x for name, x in inputs.items()}


OPERATORS = (
    *longhorn_rows(),
    # --- fla on a GPU ---
    fla('chunk_gla', 'gla', dict(q=Q, k=Q, v=V, g=DECAYS), references.gla, (2, 5)),
    fla('chunk_delta_rule', 'delta_rule', dict(q=Q, k=UNIT, v=V, beta=STEP), references.delta_rule, (3, 8)),
    fla('chunk_gated_delta_rule', 'gated_delta_rule', GATED, references.gated_delta_rule, (3, 8)),
    fla('chunk_kda', 'kda', KDA, references.gated_delta_rule, (3, 8)),
    fla('fused_recurrent_delta_rule', 'delta_rule', dict(q=Q, k=UNIT, v=V, beta=STEPS), references.delta_rule, (3, 8)),
    fla('fused_recurrent_hgrn', 'hgrn', dict(x=Input('BTC'), g=Input('BTC', F.logsigmoid)), references.hgrn, (1, 3),
        matrix=False, output='BTC', equal_state=no_keys),
    # --- mamba_ssm and the authors' CUDA op, which comes in a changed mamba_ssm ---
    Operator(
        name='selective_scan_fn', backend='cuda', device='cuda',
        function='mamba_ssm.ops.selective_scan_interface:selective_scan_fn', inputs=SCAN,
        reference=references.selective_scan, fma=(5, 12), output='BCT', equal_state=one_head,
    ),
    Operator(
        name='mamba_chunk_scan_combined', backend='triton', device='cuda',
        function='mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined', inputs=SCAN2,
        reference=references.mamba2_scan, fma=(2, 5), matrix=True, options=dict(chunk_size=256), equal_state=mamba2_heads,
    ),
    Operator(
        name='selective_scan_online7_fn', backend='cuda', device='cuda',
        function='mamba_ssm.ops.selective_scan_interface:selective_scan_online7_fn',
        inputs=dict(u=Input('BCT'), Q=Input('BKT'), K=Input('BKT'), T=Input('BCT')),
        reference=references.online_scan, fma=(4, 12), output='BCT', equal_state=one_head,
    ),
    # --- fla's naive ops and transformers' reference paths on the CPU ---
    fla_naive('naive_recurrent_gla', 'gla', dict(q=Q, k=Q, v=V, gk=DECAYS), references.gla, (2, 5)),
    fla_naive('delta_rule_chunkwise', 'delta_rule', HEAD_FIRST | dict(beta=Input('BHT', torch.sigmoid)),
              references.delta_rule_head_first, (3, 8), output='BHTV'),
    fla_naive('delta_rule_recurrence', 'delta_rule', HEAD_FIRST | dict(beta=Input('BHTV', torch.sigmoid)),
              references.delta_rule_head_first, (3, 8), output='BHTV'),
    fla_naive('naive_recurrent_gated_delta_rule', 'gated_delta_rule', GATED, references.gated_delta_rule, (3, 8)),
    fla_naive('naive_chunk_gated_delta_rule', 'gated_delta_rule', GATED, references.gated_delta_rule, (3, 8), max_tokens=256),
    fla_naive('naive_recurrent_kda', 'kda', KDA, references.gated_delta_rule, (3, 8)),
    fla_naive('naive_chunk_kda', 'kda', KDA, references.gated_delta_rule, (3, 8), max_tokens=128),
    fla_naive('naive_recurrent_hgrn', 'hgrn', dict(x=Input('BTC'), g=Input('BTC', F.logsigmoid)), references.hgrn, (1, 3),
              output='BTC', equal_state=no_keys),
    Operator(
        name='mamba_selective_scan', backend='transformers', device='cpu',
        function='transformers.models.mamba.modeling_mamba:mamba_selective_scan',
        inputs=renamed(SCAN, u='hidden_states', delta='dt'), reference=references.selective_scan, fma=(5, 12), output='BCT',
        equal_state=one_head, max_tokens=128,
    ),
    Operator(
        name='mamba2_chunk_scan', backend='transformers', device='cpu',
        function='transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan', inputs=renamed(SCAN2, x='hidden_states'),
        reference=references.mamba2_scan, fma=(2, 5), matrix=True, options=dict(chunk_size=64), equal_state=mamba2_heads,
    ),
)

# the paper's models (1.3B and 120M), an equally large state for every operator, larger keys, longer sequences
SHAPE_SETS = {
    'cuda': {
        'paper': [Shape(8, 2048, 1, 16, 4096), Shape(8, 2048, 1, 16, 1536)],
        'equal_state': [Shape(8, 2048, 1, 16, 4096), Shape(8, 2048, 1, 16, 1536)],
        'K': [Shape(8, 2048, 1, K, 1536) for K in (16, 32, 64, 128)],
        'T': [Shape(1, T, 1, 16, 4096) for T in (512, 2048, 8192, 32768, 131072)],
    },
    'cpu': {
        'paper': [Shape(1, 128, 1, 16, 4096), Shape(1, 512, 1, 16, 1536)],
        'equal_state': [Shape(1, 128, 1, 16, 1536)],
        'K': [Shape(1, 128, 1, K, 256) for K in (16, 32, 64, 128)],
        'T': [Shape(1, T, 1, 16, 256) for T in (128, 512, 2048)],
    },
}
