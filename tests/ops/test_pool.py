"""A pool of states: rows read and written where they lie, as gather, update and scatter would, and nothing else touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fla_longhorn.ops import longhorn_state_update
from fla_longhorn.selfcheck.case import Case, make_inputs, make_options
from fla_longhorn.selfcheck.compare import relative_error
from tests.devices import INTERPRETING

pytestmark = pytest.mark.usefixtures('backend', 'poison')

DECODE = Case(B=4, T=1, H=2, K=5, V=18, D=True, z=True, sigmoid=True, initial_state=True, scale=0.5)
PREFILL = Case(H=2, K=5, V=18, initial_state=True).packed(3, 0, 9, 1)
CASES = [
    DECODE,
    PREFILL,
    replace(DECODE, scalar_beta=True, state_v_first=True, dtype=torch.bfloat16),
    replace(DECODE, K=16, V=70, D=False, z=False, dtype=torch.float16),
    replace(DECODE, g='channel'),
    replace(DECODE, H=1, K=70, V=3, state_v_first=True, g='head', scalar_beta=True),
    replace(DECODE, T=3, H=1, K=16, V=33),
    replace(PREFILL, z=True, D=True, scalar_beta=True, dtype=torch.bfloat16, g='head'),
    replace(PREFILL, state_v_first=True),
    # longer than a single pass takes
    replace(PREFILL, H=1, V=33).packed(35, 5, 0, 26),
    replace(PREFILL, H=1, V=3, state_v_first=True, z=True).packed(18, 5, 2, 40),
    replace(DECODE, T=65, H=1, V=3, K=4),
    replace(PREFILL, K=17, V=33, state_v_first=True, g='head', scalar_beta=True, dtype=torch.bfloat16).packed(35, 5, 0, 26),
]
# the rows of four sequences in a pool of nine
INDICES = {
    'all': dict(state_indices=[7, 2, 0, 8]),
    'one absent': dict(state_indices=[7, -1, 0, 8]),
    'block 0 is null': dict(state_indices=[7, 0, 3, 0], pad_slot_id=0),
    'null is beyond the pool': dict(state_indices=[7, 2**31 - 1, 3, 0], pad_slot_id=2**31 - 1),
    'all absent': dict(state_indices=[-1, -1, -1, -1]),
    'some start from zero': dict(state_indices=[7, -1, 0, 8], has_initial_state=[True, True, False, False]),
    'written elsewhere': dict(state_indices=[7, 2, 7, 8], final_state_indices=[1, 2, -1, 5]),
    'null is not written': dict(state_indices=[7, 2, 3, 8], final_state_indices=[1, 0, 3, 5], pad_slot_id=0),
    'everything': dict(
        state_indices=[6, -1, 6, 8], final_state_indices=[0, 4, -1, 5], has_initial_state=[False, True, True, True],
    ),
    'zeros without a pool': dict(has_initial_state=[True, False, True, False]),
}
P = 9


@dataclass
class Call:
    """One call on a pool that lies in a larger page of NaN, and what stands for it without a pool."""

    case: Case
    exact: bool
    rows: dict
    index: torch.dtype
    device: torch.device
    # elements before and after each row; with 16 rows are as aligned as states without a pool, for kernels to be the same
    room: int = 16

    def __post_init__(self):
        inputs = {name: x.detach() for name, x in make_inputs(self.case, self.device).items()}
        options = make_options(self.case, self.device, self.exact)
        del options['output_final_state'], inputs['initial_state']
        self.inputs, self.options = inputs, options
        # 'zeros without a pool' has as many rows as sequences
        count = P if 'state_indices' in self.rows else 4
        shape = (self.case.V, self.case.K) if self.case.state_v_first else (self.case.K, self.case.V)
        size = self.case.H * self.case.K * self.case.V
        self.page = torch.full((count, size + 2 * self.room), float('nan'), device=self.device)
        self.pool = self.page[:, self.room:self.room + size].unflatten(1, (self.case.H, *shape))
        self.pool.copy_(torch.randn(self.pool.shape, generator=torch.Generator().manual_seed(2)))
        own = list(range(4))
        self.first = self.rows.get('state_indices', own)
        self.last = self.rows.get('final_state_indices', self.first)
        self.starts = self.rows.get('has_initial_state', [True] * 4)
        null = self.rows.get('pad_slot_id', -1)
        self.first, self.last = ([-1 if row == null else row for row in x] for x in (self.first, self.last))
        # rows that nothing may read
        for row in set(range(count)) - {row for row, start in zip(self.first, self.starts, strict=True) if start}:
            self.pool[row] = float('nan')

    def arguments(self) -> dict:
        def tensor(name, x):
            return x if name == 'pad_slot_id' else torch.tensor(
                x, dtype=torch.bool if name == 'has_initial_state' else self.index, device=self.device,
            )
        return {**self.inputs, **self.options, **{name: tensor(name, x) for name, x in self.rows.items()}}

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the page, by gather, update and scatter, one sequence after the other."""
        page, states = self.page.clone(), []
        for row, start in zip(self.first, self.starts, strict=True):
            states.append(self.pool[row] if row >= 0 and start else torch.zeros_like(self.pool[0]))
        states = torch.stack(states)
        o = longhorn_state_update(states, **self.inputs, **self.options)
        bounds = self.options.get('cu_seqlens')
        for n, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            if first < 0:
                output = o[n] if bounds is None else o[0, bounds[n]:bounds[n + 1]]
                output.zero_()
            elif last >= 0:
                page[last, self.room:-self.room] = states[n].flatten()
        return o, page

    def check(self, **changes) -> None:
        """Outputs and the whole page, as integers, for it is full of NaN."""
        (o_expected, page_expected), pointer = self.expected(), self.page.data_ptr()
        assert torch.equal(longhorn_state_update(self.pool, **self.arguments() | changes), o_expected)
        assert o_expected.isfinite().all() and self.page.data_ptr() == pointer
        assert torch.equal(self.page.view(torch.int32), page_expected.view(torch.int32))


def choices(case: Case) -> list[str]:
    return list(INDICES) if case is PREFILL else ['everything']


@pytest.mark.parametrize(('case', 'rows'), [
    pytest.param(case, rows, id=f'{case}-{rows}', marks=[pytest.mark.slow] if INTERPRETING and case.T > 50 else [])
    for case in CASES for rows in choices(case)
])
def test_pool_equals_gather_update_scatter(case, rows, exact, device):
    index = torch.int32 if rows in ('all', 'everything') else torch.int64
    Call(case, exact, INDICES[rows], index, device).check()


@torch.no_grad()
@pytest.mark.parametrize('rows', INDICES)
def test_decoding_without_gradients(rows, exact, device):
    """The usual step of a server, which skips most checks."""
    Call(replace(DECODE, scale=None), exact, INDICES[rows], torch.int32, device).check()


def test_absent_tokens_may_be_anything(exact, device):
    """What fills a batch up to the size of a captured graph."""
    call = Call(DECODE, exact, INDICES['one absent'], torch.int64, device)
    padded = {name: x.clone() for name, x in call.inputs.items() if x.dim() > 2}
    for x in padded.values():
        x[1] = float('nan')
    call.check(**padded)


def test_rows_may_lie_anywhere(exact, device):
    """Not aligned to 16 bytes, where kernels load other vectors and may sum in another order."""
    call = Call(replace(DECODE, K=16, V=64), exact, INDICES['everything'], torch.int32, device, room=3)
    o_expected, page_expected = call.expected()
    before = call.page.clone()
    o = longhorn_state_update(call.pool, **call.arguments())
    assert relative_error(o, o_expected) <= 1e-6
    assert relative_error(call.page[[0, 5], 3:-3], page_expected[[0, 5], 3:-3]) <= 1e-6
    call.page[[0, 5], 3:-3] = before[[0, 5], 3:-3]
    assert torch.equal(call.page.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize('name', ['state_indices', 'final_state_indices', 'has_initial_state'])
def test_a_column_of_a_table(name, exact, device):
    call = Call(DECODE, exact, INDICES['everything'], torch.int32, device)
    rows = call.arguments()[name]
    # what lies beside them are rows that exist and belong to no sequence, or the opposite
    beside = ~rows if name == 'has_initial_state' else torch.tensor([1, 2, 3, 7], dtype=torch.int32, device=device)
    table = torch.stack([rows, beside], 1)
    call.check(**{name: table[:, 0]})


def test_single_tokens_packed_or_not(exact, device):
    """A decoding batch in one row and `cu_seqlens`, or in rows of one token."""
    rows, packed = (Call(DECODE, exact, INDICES['one absent'], torch.int64, device) for _ in range(2))
    o = longhorn_state_update(rows.pool, **rows.arguments())
    arguments = packed.arguments()
    arguments |= {name: arguments[name].transpose(0, 1) for name in ('q', 'k', 'v', 'beta', 'z')}
    o_packed = longhorn_state_update(packed.pool, **arguments, cu_seqlens=torch.arange(5, device=device))
    assert relative_error(o_packed.transpose(0, 1), o) <= 1e-6
    for got, expected in zip(packed.pool, rows.pool, strict=True):
        assert relative_error(got.nan_to_num(7.), expected.nan_to_num(7.)) <= 1e-6


@torch.no_grad()
def test_rows_are_read_at_each_call(exact, device):
    """Servers write rows to the same tensor through NumPy, of which PyTorch sees nothing."""
    call = Call(replace(DECODE, scale=None), exact, INDICES['everything'], torch.int32, device)
    arguments, pools = call.arguments(), []
    rows = arguments['state_indices']
    memory = torch.from_numpy(rows.numpy()) if device.type == 'cpu' else rows
    for first in ([6, -1, 6, 8], [8, 3, -1, 6], [6, -1, 6, 8]):
        memory.copy_(torch.tensor(first))
        pools.append(call.pool.nan_to_num())
        longhorn_state_update(pools[-1], **arguments)
        fresh = call.pool.nan_to_num()
        longhorn_state_update(fresh, **arguments | {'state_indices': torch.tensor(first, device=device)})
        assert torch.equal(pools[-1], fresh)
    assert torch.equal(pools[0], pools[2]) and not torch.equal(pools[0], pools[1])
