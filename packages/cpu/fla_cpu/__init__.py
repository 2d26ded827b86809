"""fla's own modules on the CPU, in PyTorch and in loops compiled by Numba.

`import fla_longhorn` registers them. Without it:

    changes = fla_cpu.register(fla_longhorn.patches.changes.Changes())    # `changes.revert()` undoes it
"""

from __future__ import annotations

import importlib
from inspect import unwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fla_longhorn.patches.changes import Changes

__all__ = ['register']

# each registers its implementations
MODULES = ('activations', 'convolution', 'loss_modules', 'losses', 'norms', 'rotary', 'rwkv')


def register(changes: Changes) -> Changes:
    """Make fla's norms, convolution, losses, activations, rotary embedding and token shift work on CPU tensors.

    Args:
        changes (Changes):
            Records the changes.

    Returns:
        Changes: what was changed, for `revert()`.
    """
    from fla import backends

    from fla_cpu.backend import IMPLEMENTATIONS, REPLACEMENTS, CPUBackend

    for name in MODULES:
        importlib.import_module(f'fla_cpu.{name}')
    # empty if the registry is switched off
    registries = backends._function_registries
    for entry_point, implementation, verifier in IMPLEMENTATIONS:
        registry = registries.get(unwrap(entry_point))
        with changes.of_mapping(f'fla.backends of {entry_point.__name__}', {} if registry is None else registry._backends):
            backends.register(entry_point, backend=CPUBackend, verifier=verifier)(implementation)
    for owner, name, replacement in REPLACEMENTS:
        changes.set_attribute(owner, name, replacement)
    return changes
