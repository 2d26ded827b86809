"""Padding and packing of a call, from the arguments of fla, transformers and TRL; and the keywords that a forward accepts.

fla passes packed sequences as `cu_seqlens`. transformers' `DataCollatorWithFlattening` and TRL's `padding_free` and `packing`
pass one or more of `position_ids` that restart, `cu_seq_lens_q`, `cu_seq_lens_k` and `seq_idx`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from fla_longhorn.modules.cache import check_layers, seen_tokens
from fla_longhorn.modules.rows import Packed, Padded, Rows, Unpadded
from fla_longhorn.ops.inputs import check_cp_context, check_cu_seqlens, check_cu_seqlens_layout, is_capturing
from fla_longhorn.ops.plain import is_transformed

if TYPE_CHECKING:
    from fla.models.utils import Cache

CU_SEQLENS = ('cu_seq_lens_q', 'cu_seq_lens_k')
PER_TOKEN = ('position_ids', 'seq_idx')
# libraries pass these to every model; here they are ignored
WITHOUT_EFFECT = (
    'max_length_q', 'max_length_k', 'cache_position', 'token_type_ids', 'output_router_logits', 'tokenizer',
    'assistant_tokenizer', 'num_items_in_batch',
)
KEYWORDS = ('cu_seqlens', 'cu_seqlens_cpu', 'cp_context', *CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)


def check_keywords(owner: str, kwargs: dict[str, Any], more: Iterable[str] = ()) -> None:
    """Raise `TypeError`, as Python does, for an unknown keyword whose value is not None."""
    for name, value in kwargs.items():
        if value is not None and name not in KEYWORDS and name not in more:
            raise TypeError(f'{owner} got an unexpected keyword argument {name!r}; those it takes are {", ".join(KEYWORDS)}')


def resolve_call(
    model: Any, kwargs: dict[str, Any], attention_mask: torch.Tensor | None, tokens: torch.Tensor | None, cache: Cache | None,
) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """Check a model's call on `tokens` `[B, T, ...]` and resolve it once for all layers.

    With attention layers, the mask covers the tokens in the cache too.

    Returns:
        The mask, `None` without padding, and the keywords, with the result of :func:`resolve_rows` as `rows`.

    Raises:
        ValueError: there is no token, the cache is of another model, or as :func:`resolve_rows`.
        TypeError: an unknown keyword, or as :func:`resolve_rows`.
    """
    check_keywords(f'{type(model).__name__}.forward', kwargs)
    if kwargs.get('num_items_in_batch') is not None and not torch.compiler.is_compiling():
        warnings.warn(
            f'num_items_in_batch has no effect in {type(model).__name__}, which has no loss: the head around it must divide '
            'the sum of its losses by it, or have accepts_loss_kwargs = False, by which the Trainer averages over batches',
            stacklevel=2,
        )
    check_layers(cache, model.layers)
    if tokens is None:
        return attention_mask, kwargs
    if tokens.dim() < 2 or not (torch.compiler.is_compiling() or tokens.numel()):
        raise ValueError(
            'input_ids must have the shape [B, T], or inputs_embeds [B, T, D], with at least one row and one token, '
            f'got {list(tokens.shape)}'
        )
    (B, T), seen = tokens.shape[:2], seen_tokens(cache)
    length = None if getattr(model.config, 'attn', None) is None else T + seen
    rows, kwargs = resolve_rows(kwargs, B, T, tokens.device, attention_mask, length, filled=seen > 0)
    # traced activation checkpoints accept no object of ours as an argument
    if torch.compiler.is_compiling() or kwargs.get('cp_context') is not None:
        return attention_mask, kwargs
    if rows is None:
        return None, kwargs
    return attention_mask, {**kwargs, 'rows': rows}


def resolve_rows(
    kwargs: dict[str, Any], B: int, T: int, device: torch.device, attention_mask: torch.Tensor | None = None,
    length: int | None = None, filled: bool = False,
) -> tuple[Rows | None, dict[str, Any]]:
    """How B rows hold their T tokens (`None`: one sequence per row), and `kwargs` with the boundaries as `cu_seqlens` only.

    Tensors on a device are read on the host at most once, and not at all for one token.

    Args:
        kwargs (dict):
            May hold `cu_seqlens`, `cp_context`, `cu_seq_lens_q`, `cu_seq_lens_k`, `position_ids` and `seq_idx`.
        length (int, Optional):
            Columns that the mask must have; `None` allows any number from T on, and the last T are used.
        filled (bool, Optional):
            Whether the tokens continue a cache.

    Raises:
        ValueError: the arguments contradict each other or are not supported together.
        TypeError: one of them is not a tensor of integers, or the mask is not a tensor.
    """
    if attention_mask is None and not kwargs:
        return None, kwargs
    check_attention_mask(attention_mask, B, T, device, length)
    if kwargs.get('cp_context') is not None:
        check_cp_context(kwargs['cp_context'])
    given = {name: kwargs[name] for name in (*CU_SEQLENS, *PER_TOKEN) if kwargs.get(name) is not None}
    rest = {name: x for name, x in kwargs.items() if name not in (*CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)}
    for name in PER_TOKEN:
        if name in given:
            given[name] = _per_token(name, given[name], B, T)
    if T == 1:
        given = {name: x for name, x in given.items() if name not in PER_TOKEN}
    cp_context = kwargs.get('cp_context')
    own = kwargs.get('cu_seqlens') if cp_context is None else cp_context.cu_seqlens
    if attention_mask is None and own is None and not given:
        return None, rest
    if torch.compiler.is_compiling() or is_transformed():
        return _in_a_trace(given, rest, own, attention_mask, T, device)

    own_cpu = kwargs.get('cu_seqlens_cpu') if cp_context is None else cp_context.cu_seqlens_cpu
    if own is not None and cp_context is None:
        check_cu_seqlens_layout(own, own_cpu, B, device)
    unread = is_capturing(device)
    mask_read = attention_mask is not None and (attention_mask.device.type == 'cpu' or not (unread or T == 1))
    wanted = {**given, 'attention_mask': attention_mask if mask_read else None}
    if own is not None and own_cpu is None and not unread and (given or cp_context is None):
        wanted['cu_seqlens'] = own
    host = read({name: x for name, x in wanted.items() if isinstance(x, torch.Tensor)})
    own_cpu = host.get('cu_seqlens', own_cpu)
    mask = host.get('attention_mask')
    if mask is not None:
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.numel():
            raise ValueError(f'attention_mask must hold 0 for padding and 1 for tokens, got {wrong[0].item()}')
        mask = mask != 0

    found: dict[str, Any] = {}
    if own is not None:
        if cp_context is None:
            check_cu_seqlens(own, own_cpu, B, T, device)
        found['cu_seqlens'] = own_cpu
    for name in CU_SEQLENS:
        if name in given:
            if B != 1:
                raise ValueError(f'{name} packs all sequences into one row, so the batch must have B = 1, got B = {B}')
            check_cu_seqlens(host.get(name, given[name]), None, B, T, torch.device('cpu'), name)
            found[name] = host[name]
    alone = not found
    for name, find_starts in (('position_ids', _restarts), ('seq_idx', _changes)):
        if name in given:
            starts = find_starts(host[name].expand(B, T), mask)
            if len(starts):
                _check_packed(name, B, filled and alone, mask[:, -T:] if alone and mask is not None else None)
            found[name] = F.pad(F.pad(starts, (1, 0)), (0, 1), value=T).int()
    _check_agreement(found)
    if cp_context is not None:
        return None, rest

    if own is not None:
        return Packed(own, own_cpu), {**rest, 'cu_seqlens_cpu': own_cpu}
    if found and not (alone and all(x.shape[0] == 2 for x in found.values())):
        bounds = next(iter(found.values()))
        packed = Packed(bounds.to(device, non_blocking=True), bounds)
        return packed, {**rest, 'cu_seqlens': packed.cu_seqlens, 'cu_seqlens_cpu': bounds}
    if mask is not None:
        kept = mask[:, -T:]
        if kept.all():
            return None if mask.all() else Rows(mask), rest
        if T > 1 and kept.any():
            return Unpadded(mask, T, device), rest
    return None if attention_mask is None else Padded(attention_mask[:, -T:], mask), rest


def read(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, with one synchronisation for all tensors of a device."""
    away = {name: x.detach() for name, x in tensors.items() if x.device.type != 'cpu'}
    if len({x.device for x in away.values()}) == 1 and len(away) > 1:
        # float64 holds masks, positions and boundaries exactly
        flat = torch.cat([x.flatten().double() for x in away.values()]).cpu()
        parts = flat.split([x.numel() for x in away.values()])
        copies = {name: part.view(x.shape).to(x.dtype) for (name, x), part in zip(away.items(), parts, strict=True)}
    else:
        copies = {name: x.cpu() for name, x in away.items()}
    return {name: copies.get(name, x) for name, x in tensors.items()}


def check_attention_mask(mask: torch.Tensor | None, B: int, T: int, device: torch.device, length: int | None = None) -> None:
    """Raise unless the mask is `[B, >= T]`, or `[B, length]`, on `device`; its values are not read."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f'attention_mask must be a torch.Tensor or None, got {type(mask).__name__}')
    if mask.dim() != 2:
        raise ValueError(
            f'attention_mask must be a 0-1 padding mask of shape [batch_size, sequence_length], got shape {list(mask.shape)}'
        )
    if mask.shape[0] != B or mask.shape[1] < T or (length is not None and mask.shape[1] != length):
        wanted = f'[{B}, {length}], the tokens in the cache included' if length is not None else f'[B, >= T] = [{B}, >= {T}]'
        raise ValueError(f'attention_mask must have shape {wanted}, got {list(mask.shape)}')
    if mask.device != device:
        raise ValueError(f'attention_mask must be on the device of the input ({device}), got {mask.device}')


def _in_a_trace(
    given: dict[str, Any], rest: dict[str, Any], own: torch.Tensor | None, attention_mask: torch.Tensor | None, T: int,
    device: torch.device,
) -> tuple[Rows | None, dict[str, Any]]:
    """In a trace, tensors have no values to find boundaries in or to compare."""
    if rest.get('cp_context') is not None:
        return None, rest
    if own is None and given:
        own = next((given[name].to(device) for name in CU_SEQLENS if name in given), None)
        if own is None:
            raise ValueError(
                f'{next(iter(given))} must be None in a trace of torch.compile, torch.export or torch.func, which can\'t read '
                'boundaries of packed sequences from it: they go by cu_seqlens or cu_seq_lens_q there'
            )
        rest['cu_seqlens'] = own
    if own is not None:
        return Packed(own, rest.get('cu_seqlens_cpu')), rest
    return None if attention_mask is None else Padded(attention_mask[:, -T:]), rest


def _per_token(name: str, x: torch.Tensor, B: int, T: int) -> torch.Tensor:
    """Check a tensor of one integer per token, `[B, T]` or, as flame passes positions, `[T]` for one row."""
    if not isinstance(x, torch.Tensor) or x.dtype.is_floating_point or x.dtype.is_complex:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f'{name} must be a tensor of integers, got {got}')
    rows = x[None] if x.dim() == 1 else x
    if rows.dim() != 2 or rows.shape[0] not in (1, B) or rows.shape[1] != T:
        raise ValueError(f'{name} must have shape [B, T] = [{B}, {T}], got {list(x.shape)}')
    return rows


def _check_packed(name: str, B: int, filled: bool, mask: torch.Tensor | None) -> None:
    """Raise where a row may not hold the several sequences that `name` tells."""
    if B != 1:
        raise ValueError(f'{name} packs sequences into rows, so the batch must have B = 1, got B = {B}')
    if filled:
        raise ValueError(f'{name} must be of one sequence where past_key_values is filled, got several packed ones')
    if mask is not None and not mask.all():
        raise ValueError(f'attention_mask must be None or all ones with the packed sequences of {name}, got padding')


def _restarts(position_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Columns where the positions `[B, T]` restart; positions of padding are ignored."""
    T = position_ids.shape[1]
    kept = torch.ones_like(position_ids, dtype=torch.bool) if mask is None else mask[:, -T:]
    jumps = (position_ids.diff() > 1) & kept[:, 1:] & kept[:, :-1]
    if jumps.any():
        row, column = jumps.nonzero()[0].tolist()
        before, after = position_ids[row, column:column + 2].tolist()
        raise ValueError(f'position_ids must rise by 1 or start again, got {before} followed by {after}')
    rows, columns = kept.nonzero(as_tuple=True)
    starts = (position_ids[kept].diff() <= 0) & (rows.diff() == 0)
    return columns[1:][starts]


def _changes(seq_idx: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Columns where `seq_idx` `[B, T]` changes."""
    return (seq_idx.diff() != 0).nonzero()[:, 1] + 1


def _check_agreement(found: dict[str, torch.Tensor]) -> None:
    """Raise for different boundaries; empty sequences make no difference."""
    names = list(found)
    for name in names[1:]:
        a, b = (found[x].unique().tolist() for x in (names[0], name))
        if a != b:
            raise ValueError(
                f'{names[0]} and {name} must agree on where packed sequences begin and end, got {_short(a)} and {_short(b)}'
            )


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f'[{", ".join(map(str, numbers[:8]))}, ...]'
