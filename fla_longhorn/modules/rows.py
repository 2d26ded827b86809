"""How the rows of a call hold their tokens: one sequence per row, padded rows, or packed sequences.

A model makes one of these for all its layers, so that a mask on a device is read once per call. A call of one token reads
nothing on the host, so decoding does not synchronise and can be captured in a CUDA graph.

fla passes packed sequences as `cu_seqlens`. transformers' `DataCollatorWithFlattening` and TRL's `padding_free` and `packing`
pass one or more of `position_ids` that restart, `cu_seq_lens_q`, `cu_seq_lens_k` and `seq_idx`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from fla.layers.utils import index_first_axis, pad_input

from fla_longhorn.ops.context_parallel import check_cp_context
from fla_longhorn.ops.inputs import LOW_PRECISIONS, check_cu_seqlens, check_cu_seqlens_layout, is_capturing
from fla_longhorn.ops.plain import ORDINARY, is_transformed

# tokens per program of fla's convolution (its chunk_size)
CONVOLUTION_CHUNK = 64
CU_SEQLENS = ('cu_seq_lens_q', 'cu_seq_lens_k')
# one integer per token
PER_TOKEN = ('position_ids', 'seq_idx')
# libraries pass these to every model; here they are ignored
WITHOUT_EFFECT = (
    'max_length_q', 'max_length_k', 'cache_position', 'token_type_ids', 'output_router_logits', 'tokenizer',
    'assistant_tokenizer', 'num_items_in_batch',
)
KEYWORDS = ('cu_seqlens', 'cu_seqlens_cpu', 'cp_context', *CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)


class Rows:
    """Rows of tokens without padding; the tokens before them in a cache may have some.

    `mask` is the attention mask if it was read: bool `[B, tokens in the cache + T]` on the CPU.
    """

    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None
    # keywords for :class:`fla_longhorn.modules.convolution.ShortConvolution`
    of_convolution: dict[str, Any] = {}

    def __init__(self, mask: torch.Tensor | None = None) -> None:
        self.mask = mask

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        """For a layer on another device, where accelerate splits a model."""
        return self

    def count(self, B: int) -> int:
        """Number of sequences in B rows."""
        return B

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """From `x` `[B, T, D]` to the layout in which the layer mixes tokens."""
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Back to `[B, T, D]`, with zeros for the padding."""
        return x

    def silence(self, k: torch.Tensor) -> torch.Tensor:
        """Set keys or gates `[B, T, ...]` of padding to zero, which leaves the state unchanged."""
        return k


# stands for a call that has neither padding nor packed sequences
WHOLE = Rows()


class Packed(Rows):
    """Sequences packed into one row, with boundaries `[N + 1]`; those on the CPU are `None` where they cannot be read."""

    cu_seqlens: torch.Tensor

    def __init__(self, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None) -> None:
        super().__init__()
        self.cu_seqlens, self.cu_seqlens_cpu = cu_seqlens, cu_seqlens_cpu
        indices = chunk_indices(cu_seqlens, cu_seqlens_cpu)
        self.of_convolution = {'cu_seqlens': cu_seqlens, 'chunk_indices': indices}

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        return self if device == self.cu_seqlens.device else Packed(self.cu_seqlens.to(device), self.cu_seqlens_cpu)

    def count(self, B: int) -> int:
        return self.cu_seqlens.shape[0] - 1


def chunk_indices(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None) -> torch.Tensor | None:
    """`[chunks, 2]`: for each chunk of fla's convolution on a GPU, its sequence and its index in it.

    fla's own function reads `cu_seqlens` on the host, and caches by tensor even if the tensor was changed in place.
    """
    if cu_seqlens_cpu is None or cu_seqlens.device.type == 'cpu':
        return None
    counts = cu_seqlens_cpu.diff().add(CONVOLUTION_CHUNK - 1).div(CONVOLUTION_CHUNK, rounding_mode='floor')
    sequences = torch.arange(len(counts), dtype=counts.dtype, device='cpu').repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[sequences]
    indices = torch.stack([sequences, torch.arange(len(sequences), dtype=counts.dtype, device='cpu') - first], 1)
    return indices.to(cu_seqlens, non_blocking=True)


class Unpadded(Packed):
    """Padded rows, of T tokens on `device`, whose mask was read; the layer mixes their tokens packed."""

    def __init__(self, mask: torch.Tensor, T: int, device: torch.device) -> None:
        self.kept = mask[:, -T:]
        cu_seqlens = F.pad(self.kept.sum(1).cumsum(0), (1, 0)).int()
        super().__init__(cu_seqlens.to(device, non_blocking=True), cu_seqlens)
        self.mask = mask
        self.indices = self.kept.flatten().nonzero().flatten().to(device, non_blocking=True)

    @cached_property
    def in_place(self) -> Padded:
        """The same for a layer whose parts must see rows."""
        return Padded(self.kept.to(self.indices.device, non_blocking=True), self.mask)

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        return self if device == self.indices.device else Unpadded(cast(torch.Tensor, self.mask), self.kept.shape[1], device)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return index_first_axis(x.flatten(0, 1), self.indices)[None]

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return pad_input(x.squeeze(0), self.indices, *self.kept.shape)


class Padded(Rows):
    """Padded rows, by a 0-1 mask `[B, T]`: one that cannot be read or has no tokens, or of a layer whose parts must see rows.

    Tokens and padding stay where they are; only the convolution moves the tokens of a row together. The keys of padding are
    zero, which leaves the state unchanged. `read` is the mask of :class:`Rows`.
    """

    def __init__(self, mask: torch.Tensor, read: torch.Tensor | None = None) -> None:
        super().__init__(read)
        self.padding = mask == 0
        kept = ~self.padding
        lengths = kept.sum(1)
        # padding goes behind the tokens, which do not depend on it there
        order = torch.where(kept, kept.cumsum(1) - 1, lengths[:, None] + self.padding.cumsum(1) - 1)
        self.of_convolution = {'lengths': lengths, 'order': None if mask.shape[1] == 1 else order}

    def to(self, device: torch.device, **kwargs: Any) -> Rows:
        return self if device == self.padding.device else Padded(~self.padding.to(device), self.mask)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(self.padding[..., None], 0)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(self.padding[..., None], 0)

    def silence(self, k: torch.Tensor) -> torch.Tensor:
        return k.masked_fill(self.padding.view(*self.padding.shape, *[1] * (k.dim() - 2)), 0)


def check_keywords(owner: str, kwargs: dict[str, Any], more: Iterable[str] = ()) -> None:
    """Raise `TypeError`, as Python does, for an unknown keyword whose value is not None."""
    for name, value in kwargs.items():
        if value is not None and name not in KEYWORDS and name not in more:
            raise TypeError(f'{owner} got an unexpected keyword argument {name!r}; those it takes are {", ".join(KEYWORDS)}')


def find_rows(
    kwargs: dict[str, Any], B: int, T: int, device: torch.device, attention_mask: torch.Tensor | None = None,
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
    rest = {name: x for name, x in kwargs.items() if name not in (*CU_SEQLENS, *PER_TOKEN, *WITHOUT_EFFECT)}
    cp_context, bounds, on_host = (kwargs.get(name) for name in ('cp_context', 'cu_seqlens', 'cu_seqlens_cpu'))
    if cp_context is not None:
        check_cp_context(cp_context)
        bounds, on_host = cp_context.cu_seqlens, cp_context.cu_seqlens_cpu
    elif bounds is not None:
        check_cu_seqlens_layout(bounds, on_host, B, device)
    given = {name: kwargs[name] for name in (*CU_SEQLENS, *PER_TOKEN) if kwargs.get(name) is not None}
    for name, x in given.items():
        if name in CU_SEQLENS:
            check_cu_seqlens_layout(x, None, B, getattr(x, 'device', device), name)
        else:
            given[name] = per_token(name, x, B, T)
    if T == 1:
        # a call of one token has no boundaries to read
        given = {name: x for name, x in given.items() if name in CU_SEQLENS}
    told = bounds if bounds is not None else next((x for name, x in given.items() if name in CU_SEQLENS), None)
    # asked here: a function of its own would be compiled alone after a graph break, when there are values
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed() or is_capturing(device)
    read = (told, attention_mask, *given.values())
    if traced or not all(type(x) in ORDINARY and not x.is_meta for x in read if x is not None):
        if told is None and given:
            raise ValueError(
                f'{next(iter(given))} must be None in a trace of torch.compile, torch.export or torch.func, or a capture, '
                'which can\'t read boundaries of packed sequences from it: they go by cu_seqlens or cu_seq_lens_q there'
            )
        mask = None
    else:
        mask = None if attention_mask is None or (T == 1 and not attention_mask.is_cpu) else read_mask(attention_mask)
        if bounds is not None and cp_context is None:
            check_cu_seqlens(bounds, on_host, B, T, device)
        if bounds is not None and on_host is None and (cp_context is None or given):
            on_host = bounds.cpu()
        found = {} if bounds is None or on_host is None else {'cu_seqlens': on_host}
        for name, x in given.items():
            found[name] = read_bounds(name, x.cpu(), B, T, mask, alone=told is None, filled=seen > 0)
        check_agreement(found)
        if told is None and any(len(x) > 2 for x in found.values()):
            told = next(iter(found.values()))
        on_host = on_host if bounds is not None else None if told is None else next(iter(found.values()))
    rows: Rows | None
    if cp_context is not None:
        rows = None
    elif told is not None:
        rows = Packed(told.to(device, non_blocking=True), on_host)
        rest |= {'cu_seqlens': rows.cu_seqlens, 'cu_seqlens_cpu': rows.cu_seqlens_cpu}
    else:
        rows = None if attention_mask is None else of_mask(attention_mask, mask, T)
    return rows, rest


def of_mask(attention_mask: torch.Tensor, read: torch.Tensor | None, T: int) -> Rows | None:
    """Padded rows, given what was read of the mask; rows that their tokens fill need none."""
    if read is not None:
        kept = read[:, -T:]
        if kept.all():
            return None if read.all() else Rows(read)
        if T > 1 and kept.any():
            return Unpadded(read, T, attention_mask.device)
    return Padded(attention_mask[:, -T:], read)


def read_mask(mask: torch.Tensor) -> torch.Tensor:
    """A bool copy on the CPU."""
    mask = mask.cpu()
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise ValueError(f'attention_mask must hold 0 for padding and 1 for tokens, got {wrong[0].item()}')
    return mask != 0


def read_bounds(
    name: str, x: torch.Tensor, B: int, T: int, mask: torch.Tensor | None, alone: bool, filled: bool,
) -> torch.Tensor:
    """The boundaries `[N + 1]` that an argument tells; positions of padding are ignored.

    `alone` says that no boundaries are given beside integers of the tokens, so that these alone decide.
    """
    if name in CU_SEQLENS:
        check_cu_seqlens(x, None, B, T, x.device, name)
        return x
    steps = x.expand(B, T).diff()
    kept = torch.ones(B, T, dtype=torch.bool, device='cpu') if mask is None else mask[:, -T:]
    both = kept[:, 1:] & kept[:, :-1]
    if name == 'position_ids' and (jumps := ((steps > 1) & both).nonzero()).numel():
        row, column = jumps[0].tolist()
        before, after = x.expand(B, T)[row, column:column + 2].tolist()
        raise ValueError(f'position_ids must rise by 1 or start again, got {before} followed by {after}')
    starts = (((steps <= 0) & both) if name == 'position_ids' else steps != 0).nonzero()[:, 1] + 1
    if len(starts):
        if B != 1:
            raise ValueError(f'{name} packs sequences into rows, so the batch must have B = 1, got B = {B}')
        if alone and filled:
            raise ValueError(f'{name} must be of one sequence where past_key_values is filled, got several packed ones')
        if alone and not kept.all():
            raise ValueError(f'attention_mask must be None or all ones with the packed sequences of {name}, got padding')
    return F.pad(F.pad(starts, (1, 0)), (0, 1), value=T).int()


def check_agreement(found: dict[str, torch.Tensor]) -> None:
    """Raise for different boundaries; empty sequences make no difference."""
    (first, a), *others = [(name, x.unique().tolist()) for name, x in found.items()] or [('', [])]
    for name, b in others:
        if a != b:
            raise ValueError(f'{first} and {name} must agree on where packed sequences begin and end, got {a[:8]} and {b[:8]}')


def check_attention_mask(
    mask: torch.Tensor | None, B: int, T: int, device: torch.device, seen: int = 0, covers_seen: bool = False,
) -> None:
    """Raise unless the mask, on `device`, is as :func:`find_rows` takes it; its values are not read."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor):
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


def per_token(name: str, x: torch.Tensor, B: int, T: int) -> torch.Tensor:
    """Check a tensor of one integer per token, `[B, T]` or, as flame passes positions, `[T]` for one row."""
    if not isinstance(x, torch.Tensor) or x.dtype.is_floating_point or x.dtype.is_complex:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f'{name} must be a tensor of integers, got {got}')
    rows = x[None] if x.dim() == 1 else x
    if rows.dim() != 2 or rows.shape[0] not in (1, B) or rows.shape[1] != T:
        raise ValueError(f'{name} must have shape [B, T] = [{B}, {T}], got {list(x.shape)}')
    return rows


def read_states(layer: Any, state: dict[str, Any] | None, N: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`(recurrent_state, conv_state)` of N sequences from a cache's entry for a layer; `(None, None)` for an empty entry.

    Raises:
        ValueError: the entry is not this layer's, such as that of another model's cache.
        TypeError: a state has a dtype that the operators do not accept.
    """
    if state is None:
        return None, None
    H, D = layer.num_heads, layer.intermediate_size
    wanted = {'recurrent_state': (N, H, layer.state_size, D // H), 'conv_state': (N, D, layer.conv_size)}
    for name, shape in wanted.items():
        x = state.get(name)
        if not isinstance(x, torch.Tensor) or x.shape != shape:
            got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(
                f'past_key_values must hold a {name} of shape {list(shape)}, one per sequence, in layer {layer.layer_idx}, '
                f'got {got}: is it the cache of another model or of another batch?'
            )
        if x.dtype not in LOW_PRECISIONS:
            raise TypeError(
                f'past_key_values must hold a {name} of float16, bfloat16 or float32 in layer {layer.layer_idx}, got {x.dtype}'
            )
    recurrent_state, conv_state = state['recurrent_state'], state['conv_state']
    # states from `torch.inference_mode` can be used neither by autograd nor in place; a trace cannot ask for it
    if not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
        if recurrent_state.is_inference() or conv_state.is_inference():
            return recurrent_state.clone(), conv_state.clone()
    return recurrent_state, conv_state
