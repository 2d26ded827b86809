"""Padding and packing of a call, from the arguments of fla, transformers and TRL; and the keywords that a forward accepts.

fla passes packed sequences as `cu_seqlens`. transformers' `DataCollatorWithFlattening` and TRL's `padding_free` and `packing`
pass one or more of `position_ids` that restart, `cu_seq_lens_q`, `cu_seq_lens_k` and `seq_idx`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from fla_longhorn.modules.rows import Packed, Padded, Rows, Unpadded
from fla_longhorn.ops.inputs import check_cp_context, check_cu_seqlens, check_cu_seqlens_layout, is_capturing
from fla_longhorn.ops.plain import is_transformed

CU_SEQLENS = ('cu_seq_lens_q', 'cu_seq_lens_k')
# libraries pass these to every model; here they are ignored
WITHOUT_EFFECT = (
    'max_length_q', 'max_length_k', 'cache_position', 'token_type_ids', 'output_router_logits', 'tokenizer',
    'assistant_tokenizer', 'num_items_in_batch',
)


def check_keywords(owner: str, kwargs: dict[str, Any], more: Iterable[str] = ()) -> None:
    """Raise `TypeError`, as Python does, for an unknown keyword whose value is not None."""
    for name, value in kwargs.items():
        if value is not None and name not in KEYWORDS and name not in more:
            raise TypeError(f'{owner} got an unexpected keyword argument {name!r}; those it takes are {", ".join(KEYWORDS)}')


def find_rows(
    kwargs: dict[str, Any], B: int, T: int, device: torch.device, attention_mask: torch.Tensor | None = None,
    length: int | None = None, filled: bool = False,
) -> tuple[Rows | None, dict[str, Any]]:
    """How B rows hold their T tokens (`None`: one sequence per row), and `kwargs` with the boundaries as `cu_seqlens` only.

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
    told = Boundaries(kwargs, B, T, device, attention_mask, filled)
    rest = {name: x for name, x in kwargs.items() if name not in (*CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)}
    if torch.compiler.is_compiling() or is_transformed():
        rows = told.choose_in_a_trace()
    else:
        host = told.read()
        rows = told.choose(told.agree(host), host)
    if isinstance(rows, Packed) and not isinstance(rows, Unpadded):
        rest |= {'cu_seqlens': rows.cu_seqlens, 'cu_seqlens_cpu': rows.cu_seqlens_cpu}
    return rows, rest


class Boundaries:
    """What a call tells of the sequences in its B rows of T tokens: the mask, and the keywords of fla, transformers and TRL.

    `read` copies to the host what is compared there: once, and nothing for one token. `agree` gets the boundaries that each
    argument tells, and raises if they differ. `choose` makes the rows.
    """

    def __init__(
        self, kwargs: dict[str, Any], B: int, T: int, device: torch.device, mask: torch.Tensor | None, filled: bool,
    ) -> None:
        self.B, self.T, self.device, self.mask, self.filled = B, T, device, mask, filled
        self.cp_context = kwargs.get('cp_context')
        if self.cp_context is None:
            self.cu_seqlens, self.cu_seqlens_cpu = kwargs.get('cu_seqlens'), kwargs.get('cu_seqlens_cpu')
        else:
            check_cp_context(self.cp_context)
            self.cu_seqlens, self.cu_seqlens_cpu = self.cp_context.cu_seqlens, self.cp_context.cu_seqlens_cpu
        self.given = {name: kwargs[name] for name in CU_SEQLENS if kwargs.get(name) is not None}
        for name in PER_TOKEN:
            if kwargs.get(name) is not None:
                x = _per_token(name, kwargs[name], B, T)
                # a call of one token has no boundaries to read
                self.given |= {name: x} if T > 1 else {}

    def read(self) -> dict[str, torch.Tensor]:
        """The arguments on the host; a mask that was read is bool."""
        if self.cp_context is None and self.cu_seqlens is not None:
            check_cu_seqlens_layout(self.cu_seqlens, self.cu_seqlens_cpu, self.B, self.device)
        unread = is_capturing(self.device)
        wanted = {name: x for name, x in self.given.items() if isinstance(x, torch.Tensor)}
        if self.mask is not None and (self.mask.device.type == 'cpu' or not (unread or self.T == 1)):
            wanted['attention_mask'] = self.mask
        compared = self.cp_context is None or self.given
        if self.cu_seqlens is not None and self.cu_seqlens_cpu is None and compared and not unread:
            wanted['cu_seqlens'] = self.cu_seqlens
        host = read(wanted)
        if (mask := host.get('attention_mask')) is not None:
            wrong = mask[(mask != 0) & (mask != 1)]
            if wrong.numel():
                raise ValueError(f'attention_mask must hold 0 for padding and 1 for tokens, got {wrong[0].item()}')
            host['attention_mask'] = mask != 0
        if self.cu_seqlens_cpu is not None:
            host['cu_seqlens'] = self.cu_seqlens_cpu
        return host

    def agree(self, host: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The boundaries `[N + 1]` that each argument tells."""
        B, T, found = self.B, self.T, {}
        if self.cu_seqlens is not None:
            if self.cp_context is None:
                check_cu_seqlens(self.cu_seqlens, host.get('cu_seqlens'), B, T, self.device)
            if 'cu_seqlens' in host:
                found['cu_seqlens'] = host['cu_seqlens']
        for name in (name for name in CU_SEQLENS if name in self.given):
            if B != 1:
                raise ValueError(f'{name} packs all sequences into one row, so the batch must have B = 1, got B = {B}')
            check_cu_seqlens(host.get(name, self.given[name]), None, B, T, torch.device('cpu'), name)
            found[name] = host[name]
        alone, mask = self.cu_seqlens is None and not found, host.get('attention_mask')
        for name, find_starts in PER_TOKEN.items():
            if name in self.given:
                starts = find_starts(host[name].expand(B, T), mask)
                if len(starts):
                    _check_packed(name, B, self.filled and alone, mask[:, -T:] if alone and mask is not None else None)
                found[name] = F.pad(F.pad(starts, (1, 0)), (0, 1), value=T).int()
        _check_agreement(found)
        return found

    def choose(self, found: dict[str, torch.Tensor], host: dict[str, torch.Tensor]) -> Rows | None:
        """Packed sequences before padded rows; one sequence that fills its row needs neither."""
        if self.cp_context is not None:
            return None
        if self.cu_seqlens is not None:
            return Packed(self.cu_seqlens, host.get('cu_seqlens'))
        if found and (not found.keys() <= PER_TOKEN.keys() or any(len(x) > 2 for x in found.values())):
            bounds = next(iter(found.values()))
            return Packed(bounds.to(self.device, non_blocking=True), bounds)
        if self.mask is None:
            return None
        mask = host.get('attention_mask')
        if mask is not None:
            kept = mask[:, -self.T:]
            if kept.all():
                return None if mask.all() else Rows(mask)
            if self.T > 1 and kept.any():
                return Unpadded(mask, self.T, self.device)
        return Padded(self.mask[:, -self.T:], mask)

    def choose_in_a_trace(self) -> Rows | None:
        """In a trace, tensors have no values to find boundaries in or to compare."""
        if self.cp_context is not None:
            return None
        if self.cu_seqlens is not None:
            return Packed(self.cu_seqlens, self.cu_seqlens_cpu)
        if bounds := [x for name, x in self.given.items() if name in CU_SEQLENS]:
            return Packed(bounds[0].to(self.device), self.cu_seqlens_cpu)
        if self.given:
            raise ValueError(
                f'{next(iter(self.given))} must be None in a trace of torch.compile, torch.export or torch.func, which can\'t '
                'read boundaries of packed sequences from it: they go by cu_seqlens or cu_seq_lens_q there'
            )
        return None if self.mask is None else Padded(self.mask[:, -self.T:])


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


# arguments with one integer per token, and the function that finds in which columns a sequence starts
PER_TOKEN = {'position_ids': _restarts, 'seq_idx': _changes}
KEYWORDS = ('cu_seqlens', 'cu_seqlens_cpu', 'cp_context', *CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)
