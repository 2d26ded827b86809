from fla.ops.longhorn.chunk import chunk_longhorn
from fla.ops.longhorn.fused_recurrent import fused_recurrent_longhorn
from fla.ops.longhorn.naive import naive_recurrent_longhorn

__all__ = ['chunk_longhorn', 'fused_recurrent_longhorn', 'naive_recurrent_longhorn']
