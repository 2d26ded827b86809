"""Cross entropy on the CPU.

Registered: `cross_entropy_fwd`, `cross_entropy_bwd` (behind `cross_entropy_loss`), `fused_linear_cross_entropy_fwd`,
`fused_linear_cross_entropy_bwd` and `logsumexp_fwd`. A vocabulary split over a process group is left to fla.

Logits are processed in blocks of rows that fit into the cache; only one block exists in float32. Rows whose target is
ignored, such as the prompts of a conversation, cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from fla.modules.fused_cross_entropy import ops as cross_entropy
from fla.modules.fused_linear_cross_entropy import ops as linear_cross_entropy

from fla_cpu.backend import differentiable_once, implements, verify_cpu, widen

# logits per block: 2 MiB of float32 where they are only read, 64 MiB where each block costs a pass over the weights
BLOCK_ELEMENTS = 1 << 19
MATMUL_BLOCK_ELEMENTS = 1 << 24


def verify_one_process(*args, process_group=None, **kwargs) -> tuple[bool, str | None]:
    """Accept CPU tensors whose vocabulary is not split over processes."""
    if process_group is not None:
        return False, 'a vocabulary split over a process group has no CPU implementation'
    return verify_cpu(*args, **kwargs)


def _blocks(rows: int, columns: int, elements: int) -> Iterator[slice]:
    size = max(1, elements // max(1, columns))
    return (slice(start, start + size) for start in range(0, rows, size))


def _target_blocks(target: torch.Tensor, ignore_index: int, columns: int) -> Iterator[slice | torch.Tensor]:
    """The rows that have a target: as slices if all have one, else as indices."""
    rows = (target != ignore_index).nonzero().squeeze(-1)
    blocks = _blocks(len(rows), columns, BLOCK_ELEMENTS)
    return blocks if len(rows) == len(target) else (rows[block] for block in blocks)


def _transform(logits: torch.Tensor, scale: float | None, softcapping: float | None) -> torch.Tensor:
    """Scale, then cap by `softcapping * tanh(logits / softcapping)`. May return its argument."""
    logits = widen(logits)
    if scale is not None and scale != 1:
        logits = logits * scale
    if softcapping is not None:
        logits = (logits / softcapping).tanh_().mul_(softcapping)
    return logits


@implements(cross_entropy.cross_entropy_fwd, verifier=verify_one_process)
def cross_entropy_fwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    process_group: None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Return the loss, its z-loss part and the logsumexp `[N]` of `logits` `[N, V]`, then V and 0, the first class."""
    N, V = logits.shape
    if len(target) != N:
        raise ValueError(f'target must have one class per row of logits, {N}, got {len(target)}')
    index = target.long()[:, None]
    # rows that are ignored have the value 0
    lse = torch.zeros(N, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    score = torch.zeros_like(lse)
    for block in _target_blocks(target, ignore_index, V):
        block_logits = _transform(logits[block], logit_scale, logit_softcapping)
        lse[block] = block_logits.logsumexp(-1)
        score[block] = (1 - label_smoothing) * block_logits.gather(-1, index[block]).squeeze(-1)
        if label_smoothing > 0:
            score[block] += label_smoothing * block_logits.mean(-1)
    z_loss = lse_square_scale * lse.square()
    return lse - score + z_loss, z_loss, lse, V, 0


@implements(cross_entropy.cross_entropy_bwd)
@differentiable_once('cross entropy', 'call torch.nn.functional.cross_entropy, which is fuse_cross_entropy=False in a model')
def cross_entropy_bwd(
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    total_classes: int | None = None,
    class_start_idx: int = 0,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """Return the gradient `[N, V]` of the logits, written over them with `inplace_backward`."""
    N, V = logits.shape
    dlogits = logits if inplace_backward else torch.empty_like(logits)
    dlogits.index_fill_(0, (target == ignore_index).nonzero().squeeze(-1), 0)
    index = target.long() - class_start_idx
    for block in _target_blocks(target, ignore_index, V):
        block_logits = _transform(logits[block], logit_scale, logit_softcapping)
        block_lse = lse[block, None]
        grad = (block_logits - block_lse).exp_()
        if lse_square_scale != 0:
            grad.mul_(1 + 2 * lse_square_scale * block_lse)
        if label_smoothing > 0:
            grad.sub_(label_smoothing / (V if total_classes is None else total_classes))
        here = ((index[block] >= 0) & (index[block] < V)).nonzero().squeeze(-1)
        grad[here, index[block][here]] -= 1 - label_smoothing
        if logit_softcapping is not None:
            grad.mul_(1 - (block_logits / logit_softcapping).square_())
        dlogits[block] = grad.mul_(dloss[block, None] * logit_scale).to(dlogits.dtype)
    return dlogits


def _scaled(grad: torch.Tensor | None, do: torch.Tensor) -> torch.Tensor | None:
    """The saved gradient times that of the loss. Not in place, so that a second backward is right too."""
    return grad if grad is None or do == 1 else grad * do


def verify_ignored(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, ignore_index: int = -100,
    use_l2warp: bool = False, **kwargs,
) -> tuple[bool, str | None]:
    """Accept targets of which some are ignored, but not all, unless the penalty needs each row's logits."""
    accepted, reason = verify_one_process(x, **kwargs)
    if not accepted:
        return accepted, reason
    if use_l2warp:
        return False, 'use_l2warp penalises the logits of ignored rows too'
    if len(target) != len(x):
        return False, f'{len(x)} rows and {len(target)} targets'
    ignored = (target == ignore_index).sum().item()
    return 0 < ignored < len(target), f'{ignored} of {len(target)} targets are ignored'


@implements(linear_cross_entropy.fused_linear_cross_entropy_fwd, verifier=verify_ignored)
def fused_linear_cross_entropy_fwd(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    num_chunks: int = 8,
    reduction: str = 'mean',
    use_l2warp: bool = False,
    l2_penalty_factor: float = 1e-4,
    accumulate_grad_in_fp32: bool = True,
    process_group: None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the loss, and the gradients of `x` `[N, H]` (0 in ignored rows), weight and bias.

    fla's function, which is PyTorch except for the functions above, for the rows that have a target.
    """
    rows = (target != ignore_index).nonzero().squeeze(-1)
    loss, dx, dw, db = linear_cross_entropy.fused_linear_cross_entropy_fwd(
        x[rows], target[rows], weight, bias, ignore_index, label_smoothing, logit_scale, logit_softcapping, num_chunks,
        reduction, accumulate_grad_in_fp32=accumulate_grad_in_fp32,
    )
    return loss, torch.zeros_like(x).index_copy_(0, rows, dx), dw, db


@implements(linear_cross_entropy.fused_linear_cross_entropy_bwd)
@differentiable_once('linear cross entropy', 'compute it in PyTorch, by fuse_linear_cross_entropy=False in a model')
def fused_linear_cross_entropy_bwd(
    do: torch.Tensor,
    dx: torch.Tensor,
    dw: torch.Tensor | None,
    db: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Scale the gradients that the forward computed by `do`, a scalar."""
    return _scaled(dx, do), _scaled(dw, do), _scaled(db, do)


@implements(linear_cross_entropy.logsumexp_fwd)
def logsumexp_fwd(
    x: torch.Tensor,
    scale: float | None = None,
    softcapping: float | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The logsumexp `[...]` over the last dimension of `x` `[..., D]`, float32 unless `dtype` says otherwise."""
    rows = x.reshape(-1, x.shape[-1])
    z = torch.empty(len(rows), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for block in _blocks(rows.shape[0], rows.shape[1], BLOCK_ELEMENTS):
        z[block] = _transform(rows[block], scale, softcapping).logsumexp(-1)
    return z.view(x.shape[:-1]).to(z.dtype if dtype is None else dtype)
