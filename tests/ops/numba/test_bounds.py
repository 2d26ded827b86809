"""No index of the compiled loops leaves its array: random calls with every index checked.

Run as a program, for Numba compiles with bounds checks or without, for all its functions.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numba import config

from fla_longhorn.ops import chunk_longhorn, longhorn_state_update
from tests.ops.cases import Case, make_inputs, make_options, run

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_random_calls(tmp_path):
    environment = {
        **os.environ, 'NUMBA_BOUNDSCHECK': '1', 'NUMBA_CACHE_DIR': str(tmp_path), 'FLA_LONGHORN_BACKEND': 'numba',
    }
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-m', 'tests.ops.numba.test_bounds'], cwd=ROOT, env=environment, capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f'{done.stdout.splitlines()[-1]}\n{done.stderr}'


def draw(generator: random.Random) -> Case:
    flags = {name: generator.random() < 0.5 for name in ('sigmoid', 'D', 'z', 'initial_state', 'scalar_beta', 'state_v_first')}
    sizes = {
        'H': generator.choice((1, 1, 2, 3)), 'K': generator.choice((1, 2, 3, 5, 15, 16, 17, 31, 33, 48)),
        'V': generator.choice((1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 130)),
    }
    if generator.random() < 0.5:
        B, T = generator.choice((1, 2, 3)), generator.choice((1, 2, 31, 32, 33, 63, 64, 65, 129, 300))
        return Case(B=B, T=T, **sizes, **flags)
    lengths = [generator.choice((0, 0, 1, 2, 31, 32, 33, 64, 65, 100, 257)) for _ in range(generator.randint(1, 6))]
    return Case(**sizes, **flags).packed(*lengths, 1)


def main() -> None:
    assert config.BOUNDSCHECK
    torch.set_num_threads(1)
    generator = random.Random(0)
    for _ in range(150):
        case, exact = draw(generator), generator.random() < 0.5
        print(case, exact, flush=True)
        inputs, options = make_inputs(case), make_options(case, exact=exact)
        run(chunk_longhorn, inputs, options)
        if case.initial_state:
            update = {name: x.detach() for name, x in inputs.items()}
            state = update.pop('initial_state')
            options.pop('output_final_state')
            longhorn_state_update(state, **update, **options)


if __name__ == '__main__':
    main()
