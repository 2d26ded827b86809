"""`attn_mode='longhorn'` in fla's configs: a family's model with Longhorn in place of its mixer."""

from fla_longhorn.attn_mode.config import MODE, OPTIONS
from fla_longhorn.attn_mode.families import FAMILIES, REFUSED
from fla_longhorn.attn_mode.mixer import LonghornMixer

__all__ = ['FAMILIES', 'MODE', 'OPTIONS', 'REFUSED', 'LonghornMixer']
