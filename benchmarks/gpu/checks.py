"""Each operator, forward and backward, beside the float64 recurrence: quick cases of the self check, gates among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from fla_longhorn import ops
from fla_longhorn.selfcheck import case as cases
from fla_longhorn.selfcheck.case import DTYPES, make_inputs, make_options
from fla_longhorn.selfcheck.compare import check, differentiate, update

UPDATES = {'exact': True, 'diagonal': False}


def make_plan() -> dict[str, tuple[str, str, str]]:
    """`update, dtype, case`: bfloat16, as models are; then float32, whose bounds are narrow. The tests have the others."""
    chosen = [('bfloat16', name) for name in cases.QUICK]
    chosen += [('float32', name) for name in ('as in the model', 'gate per channel', 'long')]
    return {f'{form}, {dtype}, {name}': (form, dtype, name) for dtype, name in chosen for form in UPDATES}


PLAN = make_plan()


def items(device: str) -> list[str]:
    return [*PLAN]


def run(item: str, device: str) -> Iterator[dict]:
    """A row for each operator; AssertionError names what is off."""
    form, dtype, name = PLAN[item]
    problems = []
    for op in cases.OPS:
        # a call of the state update has fewer tokens, and none of several lengths
        if (case := cases.cases_of(op, quick=False).get(name)) is None:
            continue
        if device == 'meta':
            launch(op, replace(case, dtype=DTYPES[dtype]), UPDATES[form])
            continue
        result = check(op, name, case, dtype, UPDATES[form], torch.device(device))
        problems += [f'{op}: {x}' for x in result.problems]
        yield asdict(result)
    assert not problems, '; '.join(problems)


def launch(op: str, case: cases.Case, exact: bool) -> None:
    """The launches of a check, on tensors without memory."""
    device = torch.device('meta')
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    if case.lengths:
        options['cu_seqlens_cpu'] = make_options(case)['cu_seqlens']
    if op == 'longhorn_state_update':
        shape = (case.B, case.H, case.V, case.K) if case.state_v_first else (case.B, case.H, case.K, case.V)
        update(inputs, options, torch.empty(shape, dtype=torch.float32, device=device))
    else:
        differentiate(getattr(ops, op), inputs, options, case.dtype)
