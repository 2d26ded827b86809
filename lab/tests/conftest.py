from contextlib import ExitStack
from unittest.mock import patch

import pytest
from fla.modules.norm import layernorm_gated

from lab.experiments import without_gpu


@pytest.fixture(autouse=True)
def kernels():
    """fla's, in the place of which a run without a GPU puts others."""
    with ExitStack() as stack:
        for module, names, _ in without_gpu.STAND_INS:
            for name in names:
                stack.enter_context(patch.object(module, name, getattr(module, name)))
        stack.enter_context(patch.object(layernorm_gated, 'rmsnorm_fn', layernorm_gated.rmsnorm_fn))
        yield
