"""Longhorn (arXiv 2407.14207) for flash-linear-attention: importing it registers the ops, the layer and the models."""

import warnings

from fla_longhorn.requirements import check_requirements, installed_version

__version__ = '0.1.0'

check_requirements()
if installed_version('fla-longhorn-cpu'):
    # fla says twice at its import that it has no GPU; this package makes it run on a CPU
    warnings.filterwarnings('ignore', 'Triton is not supported on current platform', UserWarning)

from fla_longhorn.layers import Longhorn  # noqa: E402  after the check, which names a missing dependency
from fla_longhorn.models import (  # noqa: E402
    LonghornConfig,
    LonghornForCausalLM,
    LonghornForSequenceClassification,
    LonghornForTokenClassification,
    LonghornModel,
)
from fla_longhorn.ops import (  # noqa: E402
    chunk_longhorn,
    fused_recurrent_longhorn,
    longhorn_state_update,
    naive_chunk_longhorn,
    naive_recurrent_longhorn,
)
from fla_longhorn.patches import patch as patch  # noqa: E402
from fla_longhorn.patches import register  # noqa: E402
from fla_longhorn.patches import unregister as unregister  # noqa: E402

register()

__all__ = [
    'Longhorn', 'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification', 'LonghornForTokenClassification',
    'LonghornModel', 'chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update', 'naive_chunk_longhorn',
    'naive_recurrent_longhorn',
]
