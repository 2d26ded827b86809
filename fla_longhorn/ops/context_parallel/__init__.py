"""Context parallelism: packed sequences in contiguous parts, one on each rank of a group (fla's `FLACPContext`).

A rank's first sequence began on the `pre_num_ranks` ranks before, its last one goes on to the `post_num_ranks` ranks after.
The ranks pass on the state at their boundaries, and its gradient the other way.

The diagonal update is elementwise, so a part maps any state to `decay * state + local`. All ranks gather these summaries, two
`[H, K, V]` each, and every rank composes those of earlier tokens: one exchange for any number of ranks. A token of the exact
update multiplies the state by a matrix that differs between channels, so a summary would be `[H, V, K, K]`. There the state
itself, `[H, K, V]`, goes from rank to rank, and each waits for the one before.
"""

from fla_longhorn.ops.context_parallel.part import all_gather
from fla_longhorn.ops.context_parallel.run import check_cp_context, is_split, of_rank, run_on_ranks

__all__ = ['all_gather', 'check_cp_context', 'is_split', 'of_rank', 'run_on_ranks']
