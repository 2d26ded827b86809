"""What runs the same code as another test is slow: `make test-all` runs it."""

import pytest

# tests that both operators take in any case
BOTH = ('test_only_chunk_cuts_time', 'test_intermediate_states')
# tests of the exact recurrence by Triton, whose backward is that of the chunks
RECURRENT = ('test_flags', 'test_packed')

FILES = [('ops', f'test_{name}.py') for name in ('branches', 'gate', 'longhorn')]


def pytest_collection_modifyitems(items):
    """`fused_recurrent_longhorn` where it runs what `chunk_longhorn` runs.

    They differ in the exact update of the Triton kernels, and where time is cut into segments, which needs more tokens than
    these tests have.
    """
    for item in items:
        if (item.path.parent.name, item.path.name) in FILES:
            values = item.callspec.params if hasattr(item, 'callspec') else {}
            same = not values.get('exact') or values.get('backend') != 'triton' or item.originalname not in RECURRENT
            if 'fused_recurrent' in str(values.get('op')) and same and item.originalname not in BOTH:
                item.add_marker(pytest.mark.slow)
            # each loop takes half a minute to compile, for each dtype and gate; PyTorch's backend has the same cases
            if values.get('backend') == 'numba' and 'float16' in item.name:
                item.add_marker(pytest.mark.slow)
