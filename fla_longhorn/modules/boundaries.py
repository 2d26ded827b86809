"""Where sequences begin and end in a call: what its arguments say, compared on the CPU, and the rows that follow.

fla passes packed sequences as `cu_seqlens`. transformers' `DataCollatorWithFlattening` and TRL's `padding_free` and `packing`
pass one or more of `position_ids` that restart, `cu_seq_lens_q`, `cu_seq_lens_k` and `seq_idx`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_longhorn.modules.rows import Packed, Padded, Rows, Unpadded
from fla_longhorn.ops.context_parallel import check_cp_context
from fla_longhorn.ops.inputs import check_cu_seqlens, check_cu_seqlens_layout, is_capturing
from fla_longhorn.ops.plain import ORDINARY, is_transformed

CU_SEQLENS = ('cu_seq_lens_q', 'cu_seq_lens_k')
# one integer per token
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


def find_rows(
    kwargs: dict[str, Any], B: int, T: int, device: torch.device, attention_mask: Tensor | None = None,
    seen: int = 0, covers_seen: bool = False,
) -> tuple[Rows | None, dict[str, Any]]:
    """How B rows hold their T tokens (`None`: one sequence per row), and `kwargs` with the boundaries as `cu_seqlens` only.

    Args:
        kwargs (dict):
            May hold `cu_seqlens`, `cp_context`, `cu_seq_lens_q`, `cu_seq_lens_k`, `position_ids` and `seq_idx`.
        seen (int, Optional):
            Tokens in the cache that these continue: a mask has T to `seen + T` columns, of which the last T are of these.
        covers_seen (bool, Optional):
            Whether the mask must have all `seen + T` columns.

    Raises:
        ValueError: the arguments contradict each other or are not supported together.
        TypeError: one of them is not a tensor of integers, or the mask is not a tensor.
    """
    if attention_mask is None and not kwargs:
        return None, kwargs
    check_attention_mask(attention_mask, B, T, device, seen, covers_seen)
    told = Boundaries(kwargs, B, T, device, attention_mask)
    # asked here: a function of its own would be compiled alone after a graph break, when there are values
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed() or is_capturing(device)
    if traced or not all(type(x) in ORDINARY and not x.is_meta for x in told.tensors()):
        rows = told.choose({}, {})
    else:
        host = told.read()
        rows = told.choose(told.agree(host, filled=seen > 0), host)
    rest = {name: x for name, x in kwargs.items() if name not in (*CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)}
    if isinstance(rows, Packed) and not isinstance(rows, Unpadded):
        rest |= {'cu_seqlens': rows.cu_seqlens, 'cu_seqlens_cpu': rows.cu_seqlens_cpu}
    return rows, rest


class Boundaries:
    """What a call says of the sequences in its B rows of T tokens: the mask, and the keywords of fla, transformers and TRL.

    `read` copies to the CPU what is compared there. `agree` finds the boundaries that each argument gives and raises if they
    differ. `choose` makes the rows, in a trace from nothing that was read.
    """

    def __init__(self, kwargs: dict[str, Any], B: int, T: int, device: torch.device, mask: Tensor | None) -> None:
        self.B, self.T, self.device, self.mask, self.cp_context = B, T, device, mask, kwargs.get('cp_context')
        self.cu_seqlens, self.cu_seqlens_cpu = kwargs.get('cu_seqlens'), kwargs.get('cu_seqlens_cpu')
        if self.cp_context is not None:
            check_cp_context(self.cp_context)
            self.cu_seqlens, self.cu_seqlens_cpu = self.cp_context.cu_seqlens, self.cp_context.cu_seqlens_cpu
        elif self.cu_seqlens is not None:
            check_cu_seqlens_layout(self.cu_seqlens, self.cu_seqlens_cpu, B, device)
        self.bounds = {name: kwargs[name] for name in CU_SEQLENS if kwargs.get(name) is not None}
        for name, x in self.bounds.items():
            check_cu_seqlens_layout(x, None, B, getattr(x, 'device', device), name)
        integers = {name: per_token(name, kwargs[name], B, T) for name in PER_TOKEN if kwargs.get(name) is not None}
        # a call of one token has no boundaries to read
        self.integers = integers if T > 1 else {}

    @property
    def given(self) -> Tensor | None:
        """The boundaries that an argument gives as such."""
        return self.cu_seqlens if self.cu_seqlens is not None else next(iter(self.bounds.values()), None)

    def tensors(self) -> list[Tensor]:
        found = (self.cu_seqlens, self.mask, *self.bounds.values(), *self.integers.values())
        return [x for x in found if x is not None]

    def read(self) -> dict[str, Tensor]:
        """The arguments on the CPU, by name, of which a mask is bool."""
        wanted = self.bounds | self.integers
        if self.cu_seqlens is not None and self.cu_seqlens_cpu is None and (self.cp_context is None or wanted):
            wanted['cu_seqlens'] = self.cu_seqlens
        if self.mask is not None and (self.T > 1 or self.mask.is_cpu):
            wanted['attention_mask'] = self.mask
        host = read(wanted)
        if (mask := host.get('attention_mask')) is not None:
            wrong = mask[(mask != 0) & (mask != 1)]
            if wrong.numel():
                raise ValueError(f'attention_mask must hold 0 for padding and 1 for tokens, got {wrong[0].item()}')
            host['attention_mask'] = mask != 0
        return host if self.cu_seqlens_cpu is None else host | {'cu_seqlens': self.cu_seqlens_cpu}

    def agree(self, host: dict[str, Tensor], *, filled: bool) -> dict[str, Tensor]:
        """The boundaries `[N + 1]` by the names of the arguments that give them, from what was read of these.

        `filled` says that the sequences continue a cache.
        """
        B, T, mask, found = self.B, self.T, host.get('attention_mask'), {}
        if self.cu_seqlens is not None and 'cu_seqlens' in host:
            if self.cp_context is None:
                check_cu_seqlens(self.cu_seqlens, host['cu_seqlens'], B, T, self.device)
            found['cu_seqlens'] = host['cu_seqlens']
        for name in self.bounds:
            check_cu_seqlens(host[name], None, B, T, host[name].device, name)
            found[name] = host[name]
        for name in self.integers:
            kept = torch.ones(B, T, dtype=torch.bool, device='cpu') if mask is None else mask[:, -T:]
            starts = (restarts if name == 'position_ids' else changes)(host[name].expand(B, T), kept)
            if len(starts) and B != 1:
                raise ValueError(f'{name} packs sequences into rows, so the batch must have B = 1, got B = {B}')
            # integers of the tokens alone decide where no boundaries are given
            alone = len(starts) > 0 and self.given is None
            if alone and filled:
                raise ValueError(f'{name} must be of one sequence where past_key_values is filled, got several packed ones')
            if alone and not kept.all():
                raise ValueError(f'attention_mask must be None or all ones with the packed sequences of {name}, got padding')
            found[name] = F.pad(F.pad(starts, (1, 0)), (0, 1), value=T).int()
        check_agreement(found)
        return found

    def choose(self, found: dict[str, Tensor], host: dict[str, Tensor]) -> Rows | None:
        """Packed sequences before padded rows; rows that their tokens fill need neither."""
        if not host and self.integers and self.given is None:
            raise ValueError(
                f'{next(iter(self.integers))} must be None in a trace of torch.compile, torch.export or torch.func, or a '
                'capture, which can\'t read boundaries of packed sequences from it: they go by '
                'cu_seqlens or cu_seq_lens_q there'
            )
        if self.cp_context is not None:
            return None
        bounds, on_host = self.given, next(iter(found.values()), self.cu_seqlens_cpu)
        if bounds is None and any(len(x) > 2 for x in found.values()):
            bounds = on_host
        if bounds is not None:
            return Packed(bounds.to(self.device, non_blocking=True), on_host)
        if self.mask is None:
            return None
        if (mask := host.get('attention_mask')) is not None:
            kept = mask[:, -self.T:]
            if kept.all():
                return None if mask.all() else Rows(mask)
            if self.T > 1 and kept.any():
                return Unpadded(mask, self.T, self.device)
        return Padded(self.mask[:, -self.T:], mask)


def read(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, with one synchronisation for all integers on a device."""
    found: dict[str, Tensor] = {}
    for device in {x.device for x in tensors.values()}:
        away = {name: x for name, x in tensors.items() if x.device == device and not (x.is_cpu or x.is_floating_point())}
        if away:
            copies = torch.cat([x.flatten().long() for x in away.values()]).cpu().split([x.numel() for x in away.values()])
            found |= {name: y.view(x.shape).to(x.dtype) for (name, x), y in zip(away.items(), copies, strict=True)}
    return {name: found[name] if name in found else x.cpu() for name, x in tensors.items()}


def restarts(position_ids: Tensor, kept: Tensor) -> Tensor:
    """Columns in which positions `[B, T]` start again; those of padding, where `kept` is false, are ignored."""
    steps, both = position_ids.diff(), kept[:, 1:] & kept[:, :-1]
    jumps = ((steps > 1) & both).nonzero()
    if jumps.numel():
        row, column = jumps[0].tolist()
        before, after = position_ids[row, column:column + 2].tolist()
        raise ValueError(f'position_ids must rise by 1 or start again, got {before} followed by {after}')
    return ((steps <= 0) & both).nonzero()[:, 1] + 1


def changes(seq_idx: Tensor, kept: Tensor) -> Tensor:
    """Columns in which the index `[B, T]` of a token's sequence changes."""
    return (seq_idx.diff() != 0).nonzero()[:, 1] + 1


def check_agreement(found: dict[str, Tensor]) -> None:
    """Raise for different boundaries; empty sequences make no difference."""
    (first, a), *others = [(name, x.unique().tolist()) for name, x in found.items()] or [('', [])]
    for name, b in others:
        if a != b:
            raise ValueError(f'{first} and {name} must agree on where packed sequences begin and end, got {a[:8]} and {b[:8]}')


def check_attention_mask(
    mask: Tensor | None, B: int, T: int, device: torch.device, seen: int = 0, covers_seen: bool = False,
) -> None:
    """Raise unless the mask, on `device`, is as :func:`find_rows` takes it; its values are not read."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f'attention_mask must be a torch.Tensor or None, got {type(mask).__name__}')
    if mask.dim() != 2:
        raise ValueError(
            f'attention_mask must be a 0-1 padding mask of shape [batch_size, sequence_length], got shape {list(mask.shape)}'
        )
    if mask.shape[0] != B or not (seen + T if covers_seen else T) <= mask.shape[1] <= seen + T:
        wanted = f'[{B}, {seen + T}]' if covers_seen or not seen else f'[{B}, {T}] to [{B}, {seen + T}]'
        tokens = f'the {T} tokens of the call' + (f' and the {seen} that past_key_values has read' if seen else '')
        raise ValueError(
            f'attention_mask must have shape {wanted}, a column for each of {tokens}, and no more, got {list(mask.shape)}'
        )
    if mask.device != device:
        raise ValueError(f'attention_mask must be on the device of the input ({device}), got {mask.device}')


def per_token(name: str, x: Tensor, B: int, T: int) -> Tensor:
    """Check a tensor of one integer per token, `[B, T]` or, as flame passes positions, `[T]` for one row."""
    if not isinstance(x, Tensor) or x.dtype.is_floating_point or x.dtype.is_complex:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f'{name} must be a tensor of integers, got {got}')
    rows = x[None] if x.dim() == 1 else x
    if rows.dim() != 2 or rows.shape[0] not in (1, B) or rows.shape[1] != T:
        raise ValueError(f'{name} must have shape [B, T] = [{B}, {T}], got {list(x.shape)}')
    return rows
