"""Mutations of the commands that users run on their own device."""

from tests.mutate.mutation import INTERPRET, Mutation

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
        'other-bits-kept', 'tune.py', 'if all(map(torch.equal, call.run(), wanted)):', 'if call.run():',
        'a choice that changes results is kept', 'tests/ops/triton/test_tune.py::test_other_bits_are_not_kept', env=INTERPRET,
    ),
    Mutation(
        'another-card', 'ops/triton/tuned.py', 'if not changed:', "if changed != ['triton']:",
        'a choice for one card is used on another',
        'tests/kernels/test_tuned.py::test_a_file_of_other_circumstances_is_not_used',
    ),
    Mutation(
        'first-configuration', COMPILING, 'self.best_config = config', 'break', 'only one of an autotuner is compiled', SHARED,
    ),
]
