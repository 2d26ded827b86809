"""The calls to check."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fla_longhorn.selfcheck.case import Case

OPS = ('chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update')
case = partial(Case, T=67, V=48, initial_state=True)
CASES = {
    'as in the model': case(B=2, T=130, H=1, V=96, sigmoid=True, D=True, z=True, initial_state=False),
    'vector beta': case(),
    'scalar beta': case(scalar_beta=True),
    'beta logits': case(sigmoid=True, scale=0.5),
    # at K = 16, the exact form rounds more than these bounds in 16 bits
    'doubled steps': case(K=64, sigmoid=True, allow_neg_eigval=True),
    'doubled steps, packed': case(K=64, sigmoid=True, allow_neg_eigval=True).packed(33, 0, 40),
    'gate per head': case(g='head', sigmoid=True, D=True, z=True),
    'gate per channel': case(g='channel', sigmoid=True, D=True, z=True),
    'gate per head, packed': case(g='head', scalar_beta=True, lowest=-8.0).packed(1, 40, 0, 33, 17),
    'gate per channel, packed': case(g='channel', lowest=-8.0, D=True, z=True).packed(1, 40, 0, 33, 17),
    'gate per channel, doubled steps': case(g='channel', K=64, sigmoid=True, allow_neg_eigval=True),
    'D': case(D=True),
    'z': case(z=True),
    'state [V, K]': case(state_v_first=True, D=True, z=True),
    'packed': case(D=True, z=True, sigmoid=True).packed(1, 40, 0, 33, 17),
    'odd sizes, strided': case(B=3, T=31, H=3, K=5, V=7, scalar_beta=True, layout='strided'),
    'K = 1': case(T=19, K=1, V=33),
    'K = 128': case(B=1, T=70, H=1, K=128, V=40, z=True),
    'one token': case(T=1, sigmoid=True, D=True, z=True),
    # long and narrow: on a GPU, chunk_longhorn splits the sequence into segments
    'long': case(B=1, T=1100, H=1, K=16, V=33, sigmoid=True, D=True, z=True),
    'long, packed': case(H=1, K=8, V=32, state_v_first=True).packed(515, 7, 700),
}
QUICK = (
    'as in the model', 'scalar beta', 'doubled steps', 'gate per head', 'gate per channel', 'packed',
    'gate per channel, packed', 'odd sizes, strided', 'long',
)
# longest call of longhorn_state_update, which is for decoding
UPDATE_TOKENS = 4


def cases_of(op: str, quick: bool) -> dict[str, Case]:
    """The cases for `op`, by name."""
    cases = {name: case for name, case in CASES.items() if not quick or name in QUICK}
    if op != 'longhorn_state_update':
        return cases
    # it takes no sequences of different lengths, and those that only differ in T become one
    short = {replace(case, T=min(case.T, UPDATE_TOKENS)): name for name, case in cases.items() if case.lengths is None}
    return {name: case for case, name in short.items()}
