"""Longhorn in vLLM and SGLang, which find it by entry points, called in each of their processes, whatever it serves.

Importing this package imports neither server, nor fla and transformers, which `fla_longhorn` patches.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def register(changes: Any) -> None:
    """Tell a vLLM that has loaded the plugin what it must know of configs: it may load swapped families by remote code."""
    if getattr(sys.modules.get('fla_longhorn_serving.vllm_plugin'), 'registered', False):
        importlib.import_module('fla_longhorn_serving.vllm.config')

# the layer's options that are implemented here; `recompute` is of training, `norm_eps` without effect
KNOWN = (
    'hidden_size', 'state_size', 'expand', 'num_heads', 'conv_size', 'conv_bias', 'beta_rank', 'use_bias', 'exact',
    'scalar_beta', 'k_norm', 'tie_qk', 'value_proj', 'recompute', 'norm_eps', 'allow_neg_eigval', 'gate',
)
