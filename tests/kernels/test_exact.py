"""The compiled kernels of the exact update hold their figures: few spills, no shuffles, few instructions (no GPU needed)."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.kernels.exact_rows import table_row
from benchmarks.kernels.run import INFERENCE_ROWS, ROWS, Row, measure

# (kernel, pass, K) -> most instructions a (token, channel), spilled values, shuffles in the loop over tokens.
# At K = 64 and 128 a warp of forward and replay waits for no other: up to a seventh more instructions, and less predicted time
# (forward as the layer calls it: 0.37 to 0.29 ms at K = 64, 0.83 to 0.40 at K = 128).
# At K = 16 a thread of forward and backward owns one column, not two: a third more instructions, and registers to load a
# chunk and rows of G ahead, which takes the predicted time from 0.35 to 0.24 ms (forward) and from 0.48 to 0.32 ms (backward;
# H100, as the layer calls the op, B = 8, T = 2048, V = 4096). Four more in backward read G and A from shared memory, where one
# long sequence then takes 12 ms and not 15.5
FIGURES = {
    ('forward', 'inference', 16): (40, 0, 0),
    ('forward', 'inference', 64): (42, 0, 0),
    ('forward', 'inference', 128): (51, 14, 0),
    ('recurrent', 'decoding', 16): (140, 0, 12),
    ('gram', 'forward', 16): (1, 0, 0),
    ('forward', 'forward', 16): (42, 0, 0),
    ('forward', 'forward', 64): (42, 0, 0),
    ('forward', 'forward', 128): (51, 14, 0),
    ('replay', 'backward', 16): (35, 0, 0),
    ('backward', 'backward', 16): (54, 0, 0),
    ('products', 'backward', 16): (6, 0, 0),
    ('products', 'backward', 128): (12, 0, 0),
    ('replay', 'backward', 64): (54, 0, 0),
    ('backward', 'backward', 64): (63, 8, 0),
    ('products', 'backward', 64): (6, 0, 0),
    ('replay', 'backward', 128): (73, 72, 0),
    ('backward', 'backward', 128): (103, 140, 0),
    # as the layer calls the op, and with all that its call may add
    ('forward', 'layer', 16): (60, 0, 0),
    ('replay', 'layer', 16): (60, 0, 0),
    ('backward', 'layer', 16): (64, 0, 0),
    ('products', 'layer', 16): (6, 0, 0),
    ('forward', 'layer', 64): (59, 0, 0),
    ('replay', 'layer', 64): (84, 0, 0),
    ('backward', 'layer', 64): (75, 4, 0),
    ('forward', 'layer', 128): (68, 18, 0),
    ('replay', 'layer', 128): (109, 90, 0),
    ('backward', 'layer', 128): (111, 165, 0),
    ('forward', 'packed layer', 16): (60, 0, 0),
    ('replay', 'packed layer', 16): (60, 0, 0),
    ('backward', 'packed layer', 16): (64, 0, 0),
    ('forward', 'packed layer', 64): (59, 10, 0),
    ('replay', 'packed layer', 64): (84, 0, 0),
    ('backward', 'packed layer', 64): (75, 6, 0),
    # z alone
    ('replay', 'gate', 16): (56, 0, 0),
}
# what `make test` compiles: the rows of a training step at K = 16, for the test that adds them up too
STEP = [row for row in FIGURES if row[1] in ('forward', 'backward') and row[2] == 16]
TOGETHER = pytest.mark.xdist_group('compiled exact')


def rows() -> dict[tuple[str, str], Row]:
    """The table's rows, and those as the layer calls the op."""
    found = {(row.kernel, row.direction): row for row in (*ROWS, *INFERENCE_ROWS) if row.update == 'exact'}
    layer = ('HAS_D', 'HAS_Z', 'USE_BETA_SIGMOID')
    packed = (*layer, 'IS_VARLEN', 'USE_INITIAL_STATE', 'STORE_FINAL_STATE', 'USE_FINAL_STATE_GRADIENT')
    for direction, flags in {'layer': layer, 'packed layer': packed, 'gate': ('HAS_Z',)}.items():
        for kernel, name in {'forward': 'fwd', 'replay': 'replay', 'backward': 'bwd', 'products': 'qk'}.items():
            flags = dict.fromkeys(flags, True) | {'SAVE_STATES': True}
            found[kernel, direction] = Row(*table_row(name, kernel, direction, **flags))
    return found


@cache
def measured(row: tuple[str, str, int]) -> dict[str, float]:
    """The figures of a row, compiled once a process."""
    kernel, direction, K = row
    return measure(rows()[kernel, direction], 'sm_90', K).as_json()


# instructions for an entry of the state and token, forward and backward together, of the diagonal update
DIAGONAL = 25


@pytest.mark.parametrize('row', [
    pytest.param(row, id=str(row), marks=TOGETHER if row in STEP else pytest.mark.slow) for row in FIGURES
])
def test_compiled_figures(row):
    figures = measured(row)
    names = ('instructions_per_token_channel', 'spills', 'loop_shuffles')
    over = {name: (figures[name], most) for name, most in zip(names, FIGURES[row], strict=True) if figures[name] > most}
    assert not over, over


@pytest.mark.slow
@pytest.mark.parametrize(('kernel', 'most'), [('forward', 250), ('replay', 420), ('backward', 560)])
def test_spills_of_the_largest_state(kernel, most):
    """The order of two loads in the backward has taken 560 to 4,281."""
    row, = (x for (name, direction), x in rows().items() if name == kernel and direction in ('forward', 'backward'))
    assert measure(row, 'sm_80', 256).as_json()['spills'] <= most


@pytest.mark.slow
@pytest.mark.parametrize('kernel', ['forward', 'replay', 'backward'])
def test_float16_fits_an_a100(kernel):
    """With one product of tf32 in place of two, the replay took 256 KiB of shared memory to lay the state out anew."""
    row, = (x for (name, direction), x in rows().items() if name == kernel and direction in ('forward', 'backward'))
    assert measure(row, 'sm_80', 128, 'fp16').as_json()['shared_bytes'] <= 163 * 1024


@TOGETHER
def test_a_training_step_costs_less_than_the_diagonal_update():
    # the gram kernel runs in both passes
    rows = [*STEP, ('gram', 'forward', 16)]
    assert sum(measured(row)['instructions_per_state_update'] for row in rows) < DIAGONAL
