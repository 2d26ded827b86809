"""Longhorn's operators.

Words for pieces of time, from short to long, each a multiple of the one before:

    chunk       tokens that one substitution takes together (exact update: 8 in bfloat16 and float16, else 16)
    span        tokens between the states that the products of the exact backward load
    interval    tokens between the states saved for backward (`checkpoint_interval`)
    segment     what one program of the diagonal update reads when a row is split along the sequence
    sequence    a row, or what `cu_seqlens` delimits in a packed one

A slot is such a piece's place in a buffer, by the rules of `checkpoints.py`; a pool is a buffer of states, one per row. The
kernels of the diagonal update have more words, in `triton/diagonal/__init__.py`.
"""

from fla_longhorn.ops.chunk import chunk_longhorn
from fla_longhorn.ops.fused_recurrent import fused_recurrent_longhorn, longhorn_state_update
from fla_longhorn.ops.naive import naive_recurrent_longhorn
from fla_longhorn.ops.naive_chunk import naive_chunk_longhorn

__all__ = [
    'chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update', 'naive_chunk_longhorn', 'naive_recurrent_longhorn',
]
