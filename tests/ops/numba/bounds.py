"""Random calls of the compiled loops with every index checked; exits with the first one that leaves its array."""

import random

import torch
from numba import config

from fla_longhorn.ops import chunk_longhorn, longhorn_state_update
from tests.ops.cases import Case, make_inputs, make_options, run

CALLS = 150


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
    assert config.BOUNDSCHECK, 'NUMBA_BOUNDSCHECK=1 must be set before Numba compiles'
    torch.set_num_threads(1)
    generator = random.Random(0)
    for _ in range(CALLS):
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
