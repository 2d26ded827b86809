"""Where Triton's kernels neither run nor are interpreted, what calls nothing else is not collected."""

import builtins
import sys

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from tests.devices import INTERPRETING

collect_ignore = [] if INTERPRETING else ['test_frames.py']


def interpreted_range(*bounds):
    """Tensors, as `range` gives in compiled kernels: fla's cast them."""
    handle = type(tl.full((1,), 0, tl.int32).handle)
    bounds = [int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(getattr(x, 'value', x)) for x in bounds]
    for i in builtins.range(*bounds):
        yield tl.tensor(handle(np.array([i], np.int32), tl.int32), tl.int32)


@pytest.fixture
def interpreted_fla(monkeypatch):
    """fla's kernels under the interpreter: the first configuration, for choosing one takes a GPU."""
    import fla.ops.delta_rule
    import fla.ops.gated_delta_rule
    import fla.ops.gla  # noqa: F401

    monkeypatch.setattr(Autotuner, 'run', lambda self, *args, **kwargs: self.fn.run(
        *args, **{**kwargs, **self.configs[0].kwargs},
    ))
    for name, module in list(sys.modules.items()):
        if name.startswith(('fla.ops.common.', 'fla.ops.gla.', 'fla.ops.delta_rule.', 'fla.ops.gated_delta_rule.')):
            monkeypatch.setattr(module, 'range', interpreted_range, raising=False)
