"""What a package beside the plugin needs of it to take the layer in parts, as vLLM and timm do, or to bring loops for the CPU.

`tests/surface.json` records these names, as those of the operators and of the models.
"""

from __future__ import annotations

from fla_longhorn.attn_mode.config import is_swapped
from fla_longhorn.layers.gate import Gate, log_decays
from fla_longhorn.layers.options import check_options, rank_of
from fla_longhorn.layers.weight_decay import NoWeightDecay, no_weight_decay
from fla_longhorn.models.longhorn.configuration_longhorn import LINEAR, MIXER_OPTIONS
from fla_longhorn.modules.cache import RewindableCache
from fla_longhorn.ops import backends
from fla_longhorn.ops.arguments import Arguments, StepOptions
from fla_longhorn.ops.backends import Backend, Loops, TokenLoops, select_backend
from fla_longhorn.ops.pool import Pool
from fla_longhorn.patches.changes import Changes
from fla_longhorn.patches.parts import Register

__all__ = [
    'LINEAR', 'MIXER_OPTIONS', 'Arguments', 'Backend', 'Changes', 'Gate', 'Loops', 'NoWeightDecay', 'Pool', 'Register',
    'RewindableCache', 'StepOptions', 'TokenLoops', 'check_options', 'find_loops', 'is_swapped', 'log_decays',
    'no_weight_decay', 'rank_of', 'select_backend',
]


def find_loops() -> Loops | None:
    """What a package brings for the CPU; None if there is none, or `patch(packages=False)` took it back."""
    return backends.loops
