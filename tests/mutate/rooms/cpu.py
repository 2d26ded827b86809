"""Mutations of fla's modules on the CPU."""

from tests.mutate.mutation import Mutation

NORM = 'packages/cpu/tests/fla_cpu/test_norms.py::'
ARGUMENTS = 'packages/cpu/tests/longhorn/test_arguments.py::test_walk_over_all_arguments_of_all_loops'

MUTATIONS = [
    Mutation(
        'any-device', 'packages/cpu/fla_cpu/backend.py', "return value.device.type == 'cpu', f", 'return True, f',
        "tensors of a GPU lose fla's kernels",
        'packages/cpu/tests/fla_cpu/test_cpu.py::test_verifier_looks_at_the_first_tensor',
    ),
    Mutation(
        'float64-narrowed', 'packages/cpu/fla_cpu/backend.py', 'return x if x.dtype == torch.float64 else x.float()',
        'return x.float()',
        'gradients cannot be checked in float64', NORM + 'test_norm', '[12-dtype3',
    ),
    Mutation(
        'convolution-history', 'packages/cpu/fla_cpu/convolution.py', '(n, width + position[n, i])',
        '(n, width - 1 + position[n, i])',
        'the convolution starts from inputs one token too old',
        'packages/cpu/tests/fla_cpu/test_convolution.py::test_equation',
        '[33-4-dtype0-True -None]',
    ),
    Mutation(
        'stream-strips', 'packages/cpu/fla_cpu/loops.py', 'rows_before(carried, 3 * BD + d - first, BD, t0 > bos)',
        'rows_before(carried, 3 * BD + d - first, BD, False)', 'gradients do not cross strips of tokens',
        'packages/cpu/tests/fla_cpu/test_loops.py::test_streams', '[66-144-True-silu]',
    ),
    Mutation(
        'page-order', 'packages/cpu/fla_cpu/loops.py', 'store(pages, p + 2 * D, b_x1)', 'store(pages, p + 2 * D, b_x2)',
        "a page of vLLM's pool loses the newest input",
        'packages/cpu/tests/fla_cpu/test_loops.py::test_pages_are_the_states_of_single_tokens',
    ),
    Mutation(
        'second-backward-scaled-twice', 'packages/cpu/fla_cpu/losses.py', 'do == 1 else grad * do',
        'do == 1 else grad.mul_(do)',
        'a second backward is scaled twice', 'packages/cpu/tests/fla_cpu/test_losses.py::test_second_backward_is_scaled_once',
    ),
    Mutation(
        'rms-eps', 'packages/cpu/fla_cpu/norms.py', '.square_().div_(D).add_(eps).rsqrt_()',
        '.square_().add_(eps).div_(D).rsqrt_()',
        'eps is divided by the width', NORM + 'test_norm', '[12-dtype0',
    ),
    Mutation(
        'bias-of-any-size', 'packages/cpu/fla_cpu/loops.py',
        "address('bias', bias, (D,), optional=True),\n        address('y', y, x.shape, (x.dtype,)),",
        "0 if bias is None else bias.data_ptr(),\n        address('y', y, x.shape, (x.dtype,)),",
        'the convolution of a token reads beyond a short bias', ARGUMENTS,
    ),
    Mutation(
        'freed-memory', 'packages/cpu/fla_kit/numba/arguments.py',
        'return x.untyped_storage().nbytes() >= x.itemsize * (x.storage_offset() + size)', 'return True',
        'loops read weights whose memory was freed', ARGUMENTS,
    ),
    Mutation(
        'cache-of-one-loop', 'packages/cpu/fla_kit/numba/cache.py', 'DiskCache.is_faulty = True', 'self.is_faulty = True',
        'a faulty cache is tried again by each loop', 'packages/cpu/tests/fla_cpu/test_no_cache.py::test_a_fault_of_the_files',
        'empty',
    ),
]
