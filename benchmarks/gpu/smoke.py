"""Each kernel once, forward and backward, beside the float64 recurrence, in bfloat16 as models are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from fla_longhorn import ops
from fla_longhorn.selfcheck import case as cases
from fla_longhorn.selfcheck.case import DTYPES, make_inputs, make_options
from fla_longhorn.selfcheck.compare import check, differentiate, update

UPDATES = {'exact': True, 'diagonal': False}
# every kernel is launched by one of these; the tests have the other cases and dtypes
CASES = ('as in the model', 'gate per head', 'gate per channel', 'doubled steps', 'updates kept', 'one token', 'long')
PLAN = {f'{form}, {name}': (form, name) for name in CASES for form in UPDATES}


def items(device: str) -> list[str]:
    return [*PLAN]


def run(item: str, device: str) -> Iterator[dict]:
    """A row for each operator; AssertionError names what is off."""
    form, name = PLAN[item]
    problems = []
    for op in cases.OPS:
        # calls of the state update that differ in their length alone are one
        if (case := cases.cases_of(op, quick=False).get(name)) is None:
            continue
        if device == 'meta':
            launch(op, replace(case, dtype=DTYPES['bfloat16']), UPDATES[form])
            continue
        result = check(op, name, case, 'bfloat16', UPDATES[form], torch.device(device))
        problems += [f'{op}: {x}' for x in result.problems]
        yield asdict(result)
    assert not problems, '; '.join(problems)


def launch(op: str, case: cases.Case, exact: bool) -> None:
    """The launches of a check, on tensors without memory."""
    device = torch.device('meta')
    inputs, options = make_inputs(case, device), make_options(case, device, exact)
    if op == 'longhorn_state_update':
        shape = (case.B, case.H, case.V, case.K) if case.state_v_first else (case.B, case.H, case.K, case.V)
        update(inputs, options, torch.empty(shape, dtype=torch.float32, device=device))
    else:
        differentiate(getattr(ops, op), inputs, options, case.dtype)
