"""Where packed sequences begin and end, by whichever name a caller says it, and which other keywords a forward takes.

fla says it by `cu_seqlens`. transformers' `DataCollatorWithFlattening` and TRL's `padding_free` and `packing` say it by
`position_ids` that start again, by `cu_seq_lens_q` and `cu_seq_lens_k`, and by `seq_idx`, one of them or several.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from fla_longhorn.ops.inputs import check_cu_seqlens

CU_SEQLENS = ('cu_seq_lens_q', 'cu_seq_lens_k')
PER_TOKEN = ('position_ids', 'seq_idx')
# what libraries hand over to every model and what says nothing to this one: longest sequences, positions in a cache,
# segments of a tokenizer, experts, the tokenizer of `generate(stop_strings=...)`
WITHOUT_EFFECT = (
    'max_length_q', 'max_length_k', 'cache_position', 'token_type_ids', 'output_router_logits', 'tokenizer',
    'assistant_tokenizer',
)
KEYWORDS = ('cu_seqlens', 'cu_seqlens_cpu', 'cp_context', *CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)


def check_keywords(owner: str, kwargs: dict[str, Any], more: Iterable[str] = ()) -> None:
    """Refuse a keyword that nothing reads, as Python does; one that is None is none."""
    for name, value in kwargs.items():
        if value is not None and name not in KEYWORDS and name not in more:
            raise TypeError(f'{owner} got an unexpected keyword argument {name!r}; those it takes are {", ".join(KEYWORDS)}')


def take_boundaries(
    kwargs: dict[str, Any],
    B: int,
    T: int,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    filled: bool = False,
) -> dict[str, Any]:
    """`kwargs` of a forward on B rows of T tokens, with the boundaries under the name `cu_seqlens` alone.

    Args:
        kwargs (dict):
            With `cu_seqlens`, `cp_context`, `cu_seq_lens_q`, `cu_seq_lens_k`, `position_ids` and `seq_idx` or some of them.
        filled (bool, Optional):
            Whether the tokens continue a cache, whose states are of the rows.

    Raises:
        ValueError: names contradict each other, or what they say can't be done.
        TypeError: one of them is no tensor of integers.
    """
    given = {name: kwargs[name] for name in (*CU_SEQLENS, *PER_TOKEN) if kwargs.get(name) is not None}
    rest = {name: x for name, x in kwargs.items() if name not in (*CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)}
    for name in PER_TOKEN:
        if name in given:
            given[name] = _per_token(name, given[name], B, T)
            if T == 1:
                del given[name]
    if not given:
        return rest
    cp_context = kwargs.get('cp_context')
    own = kwargs.get('cu_seqlens') if cp_context is None else cp_context.cu_seqlens
    for name in CU_SEQLENS:
        if name in given:
            if B != 1:
                raise ValueError(f'{name} packs all sequences into one row, so the batch must have B = 1, got B = {B}')
            check_cu_seqlens(given[name], None, B, T, given[name].device, name)

    if torch.compiler.is_compiling():
        # the values of a traced tensor can't be read, neither to find boundaries nor to compare them
        if own is None:
            rest['cu_seqlens'] = next((given[name].to(device) for name in CU_SEQLENS if name in given), None)
            if rest['cu_seqlens'] is None:
                raise ValueError(
                    f'{next(iter(given))} must be None in a trace of torch.compile or torch.export, which can\'t read '
                    'boundaries of packed sequences from it: they go by cu_seqlens or cu_seq_lens_q there'
                )
        return rest

    found = {} if own is None else {'cu_seqlens': own}
    found.update((name, given[name]) for name in CU_SEQLENS if name in given)
    alone = not found
    for name, read in (('position_ids', _restarts), ('seq_idx', _changes)):
        if name in given:
            starts = read(given[name].expand(B, T), attention_mask)
            if starts is not None and B != 1:
                raise ValueError(f'{name} packs sequences into rows, so the batch must have B = 1, got B = {B}')
            if starts is not None and alone:
                _check_fresh(name, attention_mask, T, filled)
            starts = torch.arange(0) if starts is None else starts
            found[name] = F.pad(F.pad(starts, (1, 0)), (0, 1), value=T).int()
    _check_agreement(found)
    if own is None and not (alone and all(x.shape[0] == 2 for x in found.values())):
        rest['cu_seqlens'] = next(iter(found.values())).to(device)
    return rest


def _per_token(name: str, x: torch.Tensor, B: int, T: int) -> torch.Tensor:
    """`[T]`, as flame passes positions, is one row."""
    if not isinstance(x, torch.Tensor) or x.dtype.is_floating_point or x.dtype.is_complex:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f'{name} must be a tensor of integers, got {got}')
    rows = x[None] if x.dim() == 1 else x
    if rows.dim() != 2 or rows.shape[0] not in (1, B) or rows.shape[1] != T:
        raise ValueError(f'{name} must have shape [B, T] = [{B}, {T}], got {list(x.shape)}')
    return rows


def _restarts(position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Where positions start again, `None` for nowhere; those of padding don't count."""
    if (position_ids.diff() == 1).all():
        return None
    T = position_ids.shape[1]
    mask = torch.ones_like(position_ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = attention_mask[:, -T:].to(position_ids.device) != 0
    jumps = (position_ids.diff() > 1) & mask[:, 1:] & mask[:, :-1]
    if jumps.any():
        row, column = jumps.nonzero()[0].tolist()
        before, after = position_ids[row, column:column + 2].tolist()
        raise ValueError(f'position_ids must rise by 1 or start again, got {before} followed by {after}')
    rows, columns = mask.nonzero(as_tuple=True)
    starts = (position_ids[mask].diff() <= 0) & (rows.diff() == 0)
    return columns[1:][starts] if starts.any() else None


def _changes(seq_idx: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Where another sequence begins, `None` for nowhere."""
    changes = seq_idx.diff() != 0
    return changes.nonzero()[:, 1] + 1 if changes.any() else None


def _check_fresh(name: str, attention_mask: torch.Tensor | None, T: int, filled: bool) -> None:
    if filled:
        raise ValueError(f'{name} must be of one sequence where past_key_values is filled, got several packed ones')
    if attention_mask is not None and not attention_mask[:, -T:].all():
        raise ValueError(f'attention_mask must be None or all ones with the packed sequences of {name}, got padding')


def _check_agreement(found: dict[str, torch.Tensor]) -> None:
    """Refuse different boundaries; empty sequences make no difference."""
    first, *others = found
    for name in others:
        if found[name] is not found[first]:
            a, b = (found[x].cpu().unique().tolist() for x in (first, name))
            if a != b:
                raise ValueError(
                    f'{first} and {name} must agree on where packed sequences begin and end, got {_short(a)} and {_short(b)}'
                )


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f'[{", ".join(map(str, numbers[:8]))}, ...]'
