"""`attn_mode='longhorn'` in fla's configs."""

from fla_longhorn.attn_mode.swap import FAMILIES, OPTIONS, REFUSED

__all__ = ['FAMILIES', 'OPTIONS', 'REFUSED']
