"""What runs on the CPU alone, by name and with the reason: `--device` leaves it out. All else takes the fixture `device`."""

import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

import pytest

# kernels run in Triton's interpreter
INTERPRETING = os.environ.get('TRITON_INTERPRET') == '1'

# a folder, a file or a test, as pytest prints it
ON_THE_CPU = {
    'packages/cpu': 'loops for the CPU',
    'packages/offgpu': 'what stands in for a GPU',
    'packages/serving': 'served on the CPU',
    'packages/extras/tests/onnx': 'in onnxruntime on the CPU',
    'packages/extras/tests/timm/test_example.py': 'the command takes the GPU where there is one',
    'packages/extras/tests/test_batch_invariant.py::test_attention_is_refused': 'refused before there is a tensor',
    'lab': 'the experiments themselves take a device',
    'benchmarks/tests': '`python -m benchmarks gpu` runs the benchmarks themselves on a device',
    **dict.fromkeys((
        'packages/extras/tests/distributed', 'tests/layers/test_context_parallel.py::test_equals_one_rank',
        'tests/ops/context_parallel/test_op.py::test_equals_one_rank',
    ), 'ranks share no GPU, and gloo sends what is on the CPU'),
    'packages/offgpu/tests/kernels': 'compiles for GPUs that need not be there',
    'tests/layers/test_weight_decay.py::test_names_hold_after_fully_shard': 'gloo sends what is on the CPU',
    'tests/layers/test_ways_of_use.py::test_gradients_of_ranks': 'gloo sends what is on the CPU',
    'tests/models/test_gate.py::test_sharded_on_meta': 'gloo sends what is on the CPU',
    'tests/layers/test_options.py': 'options are refused before there is a tensor',
    'tests/mutate': 'reads source files',
    'tests/ops/test_errors.py::test_compiled_programs_check_boundaries_when_they_run': 'no program reads the values of a GPU',
    'tests/ops/test_errors.py::test_host_copy_that_contradicts': 'compared on the CPU alone: a GPU would be waited for',
    'tests/ops/test_last_read.py': 'a CPU tensor that says it is on a device',
    'tests/ops/test_naive.py': 'the recurrence in PyTorch, which the others are compared with on their device',
    **dict.fromkeys((f'tests/ops/test_pool_errors.py::{name}' for name in (
        'test_bad_rows', 'test_compiled_programs_check_rows_when_they_run', 'test_shared_rows_that_are_not_written_are_fine',
    )), 'rows are checked on the CPU alone: a GPU would be waited for'),
    'tests/ops/triton/test_interpreter.py': "of Triton's interpreter",
    'packages/offgpu/tests/ptx': 'executes compiled kernels without a GPU',
    'tests/upstream': "a tree of fla's source files, which programs of their own run",
    'tests/test_layout.py': 'reads source files',
    **dict.fromkeys((f'packages/tests/test_{name}.py' for name in ('ci', 'pages', 'surface', 'wheels')), 'reads source files'),
    'tests/test_package.py': 'packages and versions',
    'tests/test_surface.py': 'names, signatures and commands, without a tensor',
    'tests/test_patches.py': 'what an import changes in modules, whatever the device',
}


def hasten_interpreter() -> None:
    """Triton's, by offgpu where it is installed."""
    if find_spec('offgpu'):
        from offgpu.interpreter import make_faster

        make_faster()


def slow_but(fast: Iterable, cases: Iterable) -> list:
    """The cases, tuples of several arguments among them; those that are not `fast` are marked slow."""
    fast, cases = [*fast], [x if isinstance(x, tuple) else (x,) for x in cases]
    return [pytest.param(*x, marks=[] if x in fast or x[0] in fast else pytest.mark.slow) for x in cases]


def is_within(test: str, name: str) -> bool:
    return test == name or test.startswith((f'{name}/', f'{name}::', f'{name}['))


def why_not(test: str, left_out: Mapping[str, str] = ON_THE_CPU) -> str | None:
    """Why this test, file or folder does not run on a device."""
    # xdist appends `@group` to the names of tests that one worker runs
    test = test.partition('@')[0]
    return next((why for name, why in left_out.items() if is_within(test, name)), None)
