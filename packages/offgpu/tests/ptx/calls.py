"""The calls of the public operators that are executed as PTX. `fast` are those of `make test`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fla_longhorn.selfcheck.case import MIXED, Case

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Call:
    """`op`: `chunk` and `recurrent` with gradients, `infer` (chunk) without, `step` is `longhorn_state_update`."""

    name: str
    case: Case
    op: str = 'chunk'
    exact: bool = False
    target: str = 'sm_90'
    # tokens to a segment at least, and the exact update split along the sequence; None leaves the project's own rules
    segment: int | None = None
    # backward goes through its segments in slices, however short they are
    sliced: bool = False

    def __str__(self) -> str:
        parts = [self.name, self.target, self.op, 'exact' if self.exact else 'diagonal', str(self.case)]
        parts += [f'segment{self.segment}'] if self.segment else []
        parts += ['sliced'] if self.sliced else []
        return ' '.join(parts)

    def with_tokens(self, T: int) -> Call:
        return replace(self, case=replace(self.case, T=T))


ALL: dict[str, Any] = dict(sigmoid=True, D=True, z=True, initial_state=True)


def diagonal() -> list[Call]:
    plain, bf16 = Case(B=2, H=1, V=64), Case(B=2, H=1, V=64, dtype=BF16)
    odd = Case(H=2, K=17, V=64, state_v_first=True, **ALL)
    few = Case(B=1, H=1, K=3, V=33, initial_state=True)
    return [
        *(Call('plain', replace(plain, T=T)) for T in (7, 1, 33, 70)),
        *(Call('pairs', replace(bf16, T=T)) for T in (7, 70)),
        *(Call('packed', odd.packed(*lengths)) for lengths in ((5, 0, 33, 1, 0), (1,), (0, 0, 7), (33, 2))),
        Call('half', Case(B=1, T=33, H=2, V=33, dtype=F16, **ALL)),
        Call('one', Case(B=1, T=70, H=1, K=1, V=33, scalar_beta=True)),
        Call('wide', Case(B=1, T=33, H=1, K=64, V=33, D=True, initial_state=True)),
        Call('widest', Case(B=1, T=33, H=1, K=128, V=64)),
        Call('segments', replace(few, T=100), segment=32),
        Call('segments', few.packed(40, 0, 33, 64, 1), segment=32),
        Call('gated', Case(B=1, T=70, H=1, K=32, V=96, dtype=BF16, z=True, sigmoid=True)),
        Call('widest', Case(B=1, T=7, H=1, K=128, V=64, dtype=BF16, state_v_first=True, **ALL)),
        Call('segments', Case(B=1, T=300, H=1, K=16, V=64, dtype=BF16, **ALL), segment=128),
        Call('slices', Case(B=2, T=140, H=1, V=64, dtype=BF16), sliced=True),
        Call('slices', replace(few, T=100), segment=64, sliced=True),
        Call('view', Case(B=2, T=33, H=1, K=16, V=64, dtype=BF16, **ALL, layout='view')),
        Call('shifted', Case(B=1, T=9, H=1, K=16, V=64, dtype=BF16, layout='shifted')),
        Call('doubled', Case(B=1, T=33, H=1, V=33, dtype=BF16, allow_neg_eigval=True, **ALL)),
    ]


def step() -> list[Call]:
    return [
        Call('plain', Case(B=2, T=1, H=1, V=64), op='step'),
        Call('wide', Case(B=3, T=1, H=2, K=64, V=96, dtype=BF16, D=True, z=True, sigmoid=True), op='step'),
        Call('odd', Case(B=2, T=1, H=1, K=17, V=33, scalar_beta=True, state_v_first=True), op='step'),
        Call('widest', Case(B=1, T=1, H=2, K=128, V=33, dtype=F16, z=True), op='step'),
        Call('one', Case(B=2, T=1, H=1, K=1, V=1, dtype=BF16, D=True), op='step'),
    ]


def exact() -> list[Call]:
    odd = Case(H=2, K=17, V=33, dtype=BF16, state_v_first=True, **ALL)
    return [
        *(Call('bf16', Case(B=2, T=T, H=1, V=64, dtype=BF16), exact=True) for T in (33, 7)),
        *(Call('f32', Case(B=1, T=T, H=1, V=64), exact=True) for T in (33, 1, 70)),
        Call('f16', Case(B=1, T=33, H=1, V=33, dtype=F16, **ALL), exact=True),
        *(
            Call('bf16', Case(B=1, T=T, H=1, K=64, V=96, dtype=BF16, D=True, z=True, sigmoid=True), exact=True)
            for T in (33, 70)
        ),
        Call('f32', Case(B=1, T=33, H=1, K=64, V=33, initial_state=True), exact=True),
        *(Call('packed', odd.packed(*lengths), exact=True) for lengths in ((5, 0, 33, 1, 0), (1,), (0, 0, 7), (16, 33))),
        Call('bf16', Case(B=1, T=33, H=1, K=128, V=64, dtype=BF16), exact=True),
        Call('f16', Case(B=1, T=33, H=1, K=64, V=64, dtype=F16), exact=True),
        Call('f32', Case(B=1, T=33, H=1, K=128, V=64, D=True), exact=True),
        Call('f16', Case(B=1, T=33, H=1, K=128, V=64, dtype=F16), exact=True),
        Call('packed', Case(H=1, K=17, V=64, scalar_beta=True, initial_state=True).packed(17, 0, 40), exact=True),
        Call('odd', Case(B=1, T=17, H=1, K=100, V=96, dtype=BF16, **ALL), exact=True),
        Call('cut', Case(H=2, K=3, V=33, dtype=BF16, **ALL).packed(40, 0, 33, 1), exact=True, segment=32),
        # more chunks than are copied ahead
        *(Call('cut', Case(B=1, T=270, H=1, K=K, V=64, dtype=BF16, **ALL), exact=True, segment=32) for K in (16, 64)),
        Call('view', Case(B=2, T=33, H=1, K=16, V=64, dtype=BF16, **ALL, layout='view'), exact=True),
        # spans of the sums over channels just full, crossed and shared by a partial chunk
        Call('spans', Case(H=1, K=16, V=64, dtype=BF16, **ALL).packed(64, 5, 100, 133), exact=True),
        *(
            Call('doubled', Case(B=1, T=33, H=1, V=33, scalar_beta=scalar, allow_neg_eigval=True, **ALL), exact=True)
            for scalar in (False, True)
        ),
    ]


def decays() -> list[Call]:
    """A gate: weak and strong decays, a whole chunk and more, all options."""
    packed = replace(Case(H=2, V=33, dtype=BF16, g='head', lowest=-0.2, **ALL).packed(5, 0, 33, 17, 1), state_v_first=True)
    return [
        Call('bf16', Case(B=2, T=40, H=1, V=64, dtype=BF16, g='channel', lowest=-0.5), exact=True),
        Call('f32', Case(B=1, T=33, H=1, V=64, g='channel', lowest=-20.), exact=True),
        Call('f16', Case(B=1, T=33, H=1, V=33, dtype=F16, g='head', lowest=-1., **ALL), exact=True),
        Call('bf16', Case(B=1, T=70, H=1, K=64, V=96, dtype=BF16, g='channel', lowest=-0.5, D=True, z=True), exact=True),
        Call('bf16', Case(B=1, T=33, H=1, K=128, V=64, dtype=BF16, g='channel', lowest=-0.5), exact=True),
        Call('packed', Case(H=2, K=17, V=33, g='channel', **ALL).packed(5, 0, 33, 1), exact=True),
        # all that the kernels in the layout of tensor cores take
        Call('head', replace(packed, K=17, scale=0.5, allow_neg_eigval=True), exact=True),
        Call('head', replace(packed, K=64, sigmoid=False), exact=True, target='sm_80'),
        Call('scalar', Case(H=1, V=64, dtype=BF16, g='head', lowest=-0.5, scalar_beta=True).packed(17, 0, 40), exact=True),
        Call('cut', Case(B=1, T=270, H=1, V=64, dtype=BF16, g='channel', lowest=-0.5, **ALL), exact=True, segment=32),
        Call('options', Case(B=2, T=33, H=1, K=17, V=33, g='channel', lowest=-20., **ALL), op='recurrent', exact=True),
        Call('options', Case(B=2, T=1, H=2, K=17, V=33, g='head', state_v_first=True), op='step', exact=True),
        Call('bf16', Case(B=2, T=40, H=1, V=64, dtype=BF16, g='channel', lowest=-0.5)),
        Call('packed', Case(H=2, K=17, V=33, g='head', lowest=-20., **ALL).packed(5, 0, 33, 1)),
        Call('segments', Case(B=1, T=100, H=1, K=3, V=33, g='channel', initial_state=True), segment=32),
        Call('step', Case(B=2, T=1, H=2, K=17, V=33, g='channel', D=True), op='step'),
    ]


def kept() -> list[Call]:
    """U is kept for backward."""
    plain = Case(B=1, T=70, H=1, K=64, V=96, dtype=BF16, disable_recompute=True)
    options = replace(plain, H=2, V=33, **ALL)
    calls = [
        *(Call('plain', replace(plain, K=K, T=T)) for K, T in ((64, 70), (16, 33), (32, 7), (128, 33))),
        # the factor of dbeta where it is no logit, and the other halves of what replay may do
        Call('steps', replace(options, sigmoid=False, state_v_first=True)), Call('z', replace(plain, z=True, sigmoid=True)),
        Call('D', replace(plain, K=17, D=True, sigmoid=True, scale=0.5)),
        *(Call('packed', replace(options, K=K).packed(5, 0, 33, 17, 1)) for K in (3, 64)),
        Call('spans', replace(options, H=1, K=16).packed(64, 5, 100, 133)),
        Call('head', replace(options, K=17, g='head', sigmoid=False).packed(5, 0, 33, 17, 1)),
        Call('head', replace(plain, K=64, g='head', sigmoid=True, D=True, z=True), target='sm_80'),
        *(Call('cut', replace(options, H=1, K=K, T=270), segment=32) for K in (16, 64)),
        Call('view', replace(options, B=2, K=16, V=64, layout='view')),
    ]
    return [replace(call, exact=True) for call in calls]


def recurrent() -> list[Call]:
    return [
        Call('bf16', Case(B=2, T=33, H=1, V=64, dtype=BF16), op='recurrent', exact=True),
        Call('f32', Case(B=1, T=33, H=1, V=64), op='recurrent', exact=True),
        Call('bf16', Case(B=1, T=33, H=1, K=64, V=96, dtype=BF16, D=True, z=True, sigmoid=True), op='recurrent', exact=True),
        Call('bf16', Case(B=2, T=1, H=1, K=128, V=64, dtype=BF16, D=True, z=True, sigmoid=True), op='step', exact=True),
        Call('odd', Case(B=2, T=1, H=2, K=17, V=33, state_v_first=True), op='step', exact=True),
    ]


def other() -> list[Call]:
    """Inference, a scale, states updated in place over several tokens, inputs each of its own dtype."""
    update = Case(B=2, T=5, H=1, V=64)
    return [
        Call('scale', Case(B=1, T=33, H=1, V=64, dtype=BF16, scale=0.25), exact=True),
        Call('infer', Case(B=2, T=33, H=1, K=64, V=96, dtype=BF16, D=True, z=True, sigmoid=True), op='infer', exact=True),
        Call('infer', Case(B=2, T=33, H=1, V=64, dtype=BF16, D=True, z=True, sigmoid=True), op='infer'),
        Call('update', update, op='step'),
        Call('update', update, op='step', exact=True),
        Call('update', Case(H=2, K=17, V=33, dtype=BF16, D=True, state_v_first=True).packed(3, 0, 1, 4), op='step'),
        Call('mixed', Case(B=1, T=33, H=1, V=64, dtype=BF16, D=True, z=True, dtypes=MIXED)),
        Call('mixed', Case(B=1, T=33, H=1, V=64, dtype=BF16, D=True, z=True, dtypes=MIXED), exact=True),
    ]


def fast() -> list[Call]:
    """Every kernel at least once: plain in dense rows, and with all options in packed ones; chunks are partial in all."""
    options = Case(H=2, K=17, V=33, **ALL)
    # a state [V, K] has a channel's entries in several lanes, which must agree in the last bit of their sums
    token = Case(B=2, T=1, H=2, K=17, V=33, D=True, z=True, sigmoid=True, state_v_first=True)
    rows = Case(B=2, T=70, H=1, V=64, dtype=BF16)
    return [
        Call('rows', rows),
        Call('segments', replace(rows, B=1, T=140), segment=32),
        Call('packed', replace(options, K=3, scalar_beta=True).packed(40, 0, 33, 1), segment=32),
        Call('options', replace(token, scalar_beta=True), op='step'),
        Call('plain', Case(B=2, T=33, H=1, V=64), exact=True),
        Call('packed', replace(options, dtype=BF16, state_v_first=True).packed(5, 0, 33, 1), exact=True),
        Call('kept', replace(options, dtype=BF16, disable_recompute=True).packed(5, 0, 33, 1), exact=True),
        # a Hopper card multiplies this with warp groups
        Call('groups', Case(B=1, T=40, H=1, K=64, V=96, dtype=BF16), exact=True),
        Call('options', token, op='step', exact=True),
        Call('decays', Case(B=1, T=33, H=1, V=64, g='channel', lowest=-20.), exact=True),
        Call('decays', Case(B=1, T=33, H=1, V=64, g='head', lowest=-20.)),
    ]


def ampere() -> list[Call]:
    """Those that sm_80 runs too."""
    d, s, e, r = diagonal(), step(), exact(), recurrent()
    k = kept()
    chosen = [d[2], d[5], d[6], s[1], e[0], e[6], e[9], e[14], e[5], r[3], k[0], k[4], k[7], k[10]]
    return [replace(call, target='sm_80') for call in chosen]


GROUPS = {
    'diagonal': diagonal, 'step': step, 'exact': exact, 'decays': decays, 'recurrent': recurrent, 'other': other,
    'kept': kept, 'ampere': ampere, 'fast': fast,
}
