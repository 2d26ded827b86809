"""The Triton backend: `longhorn_fwd` and `longhorn_bwd`, the two functions of every backend.

Plain tensors in, fresh tensors out, no autograd. With B rows, T tokens, H heads, K state entries a channel, V channels and N
sequences (B without `cu_seqlens`):

    q, k [B, T, H, K]; v, z [B, T, H, V]; beta [B, T, H, V] or [B, T, H]; D [H, V], in float16, bfloat16 or float32, each its
    own, in any strides; initial_state, dht [N, H, K, V] float32 ([N, H, V, K] with state_v_first); cu_seqlens [N + 1].

    longhorn_fwd -> o (contiguous, dtype of v), final_state, and states [S, H, K, V]: the state at the start of each chunk of
    `checkpoint_interval(K)` tokens of each sequence, slots as in `ops/checkpoints.py`; how one lies in its K * V entries is
    the backend's affair. What isn't wanted is empty.
    longhorn_bwd -> the gradients of q, k, v, beta, initial_state, D, z in their inputs' dtypes; an absent input's is empty.

`final_state`, where given, is the contiguous float32 tensor that the final state is written to; it may be `initial_state`,
which is then updated in place. `exact` chooses the update, `parallel` allows to cut time into segments or chunks. All sums
are float32 and in a fixed order; unwritten memory is never read. Kernels run on the device of the tensors, whichever is
PyTorch's current one.
"""

from __future__ import annotations

from fla.utils import custom_device_ctx
from torch import Tensor

from fla_longhorn.ops.triton.diagonal import diagonal_bwd, diagonal_fwd
from fla_longhorn.ops.triton.exact import exact_bwd, exact_fwd


def longhorn_fwd(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, exact: bool, **options) -> tuple[Tensor, Tensor, Tensor]:
    with custom_device_ctx(q.device.index):
        return (exact_fwd if exact else diagonal_fwd)(q, k, v, beta, **options)


def longhorn_bwd(
    do: Tensor, dht: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, exact: bool, **options,
) -> tuple[Tensor, ...]:
    with custom_device_ctx(q.device.index):
        return (exact_bwd if exact else diagonal_bwd)(do, dht, q, k, v, beta, **options)
