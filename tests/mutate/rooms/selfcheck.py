"""Mutations of the commands that users run on their own device."""

from tests.mutate.mutation import Mutation

COMPILING, TESTS = 'selfcheck/compiling.py', 'tests/kernels/test_compile_only.py::'
STEP, SHARED = TESTS + 'test_a_step_compiles_nothing_more', TESTS + 'test_processes_share_the_work'

MUTATIONS = [
    Mutation(
        'no-decoding', COMPILING, 'model(prompt[:, :1], past_key_values=cache, use_cache=True)', 'pass',
        'the kernels of a single token are not compiled', STEP, '[exact]',
    ),
    Mutation(
        'no-short-prompt', COMPILING, 'ids[:, :SHORT], ids[:1, :SHORT]', '', 'the kernels of short prompts are not compiled',
        STEP, '[exact]',
    ),
    Mutation('launched', COMPILING, 'warmup=True, **kwargs', 'warmup=warmup, **kwargs', 'each process launches', SHARED),
    Mutation('compiled-by-all', COMPILING, 'return True', 'return False', 'all processes compile all kernels', SHARED),
    Mutation(
        'first-configuration', COMPILING, 'self.best_config = config', 'break', 'only one of an autotuner is compiled', SHARED,
    ),
]
