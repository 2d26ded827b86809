"""What runs the same code as another test, and need not run in both runs of `make test`."""

import pytest

# tests of `test_longhorn.py` and `test_gate.py` that both operators take in any case
BOTH = (
    'test_flags', 'test_packed', 'test_strided_inputs', 'test_only_chunk_cuts_time',
    'test_intermediate_states',
)


def pytest_collection_modifyitems(items):
    """`fused_recurrent_longhorn` is slow where it runs what `chunk_longhorn` runs.

    They differ in the exact update of the Triton kernels, and where time is cut into segments, which needs more tokens than
    `test_longhorn.py` has.
    """
    for item in items:
        if item.path.parent.name == 'ops' and item.path.name in ('test_longhorn.py', 'test_gate.py') and \
                item.originalname not in BOTH and hasattr(item, 'callspec'):
            values = item.callspec.params
            if 'fused_recurrent' in str(values.get('op')) and not (values.get('exact') and values['backend'] == 'triton'):
                item.add_marker(pytest.mark.slow)
