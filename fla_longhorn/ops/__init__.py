"""Longhorn's operators."""

from fla_longhorn.ops.chunk import chunk_longhorn
from fla_longhorn.ops.fused_recurrent import fused_recurrent_longhorn
from fla_longhorn.ops.naive import naive_recurrent_longhorn

__all__ = ['chunk_longhorn', 'fused_recurrent_longhorn', 'naive_recurrent_longhorn']
