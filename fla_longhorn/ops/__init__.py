"""Longhorn's operators."""

from fla_longhorn.ops.chunk import chunk_longhorn
from fla_longhorn.ops.fused_recurrent import fused_recurrent_longhorn
from fla_longhorn.ops.naive import naive_recurrent_longhorn
from fla_longhorn.ops.state_update import longhorn_state_update

__all__ = ['chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update', 'naive_recurrent_longhorn']
