"""Context parallelism: packed sequences in contiguous parts, one on each rank of a group (fla's `FLACPContext`).

A rank's part begins inside a sequence that earlier ranks began, if `pre_num_ranks` is not 0, and ends inside one that later
ranks finish, if `post_num_ranks` is not 0. What passes between ranks is the state there, and its gradient the other way.

The diagonal update is elementwise, so a part is summarised by what it does to any state: `decay * state + local`. All ranks
gather all summaries, two `[H, K, V]` each, and every rank folds those of earlier tokens: one exchange, whatever the number
of ranks. A token of the exact update multiplies the state by a matrix, another one in each channel, so its summary would be
`[H, V, K, K]`; there the state itself, `[H, K, V]`, goes from rank to rank, each waiting for the one before.
"""

from fla_longhorn.ops.context_parallel.dispatch import run

__all__ = ['run']
