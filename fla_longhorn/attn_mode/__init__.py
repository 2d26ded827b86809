"""`attn_mode='longhorn'` in fla's configs: a family's model with Longhorn in place of its mixer."""

from fla_longhorn.attn_mode.config import MODE, OPTIONS
from fla_longhorn.attn_mode.families import FAMILIES, REFUSED
from fla_longhorn.attn_mode.mixer import LonghornMixer
from fla_longhorn.attn_mode.swap import (
    wrap_block_init,
    wrap_causal_lm,
    wrap_forward,
    wrap_model_init,
    wrap_module_init,
    wrap_prepare_inputs,
)

__all__ = [
    'FAMILIES', 'MODE', 'OPTIONS', 'REFUSED', 'LonghornMixer', 'wrap_block_init', 'wrap_causal_lm', 'wrap_forward',
    'wrap_model_init', 'wrap_module_init', 'wrap_prepare_inputs',
]
