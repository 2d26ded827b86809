"""fla's attention for Longhorn's models: also without flash_attn or a GPU, and with padding beside a cache."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from fla.layers import attn
from fla.layers.attn import Attention
from fla.layers.utils import index_first_axis, pad_input
from fla.models.configuration_utils import get_attention_spec
from fla.modules.rotary import RotaryEmbedding
from fla.modules.rotary.ops import rotary_embedding_ref

from fla_longhorn.modules import flash_attention
from fla_longhorn.modules.boundaries import check_attention_mask
from fla_longhorn.modules.cache import look_ahead
from fla_longhorn.modules.dispatch import differentiable_once, has_values, in_pytorch, widen
from fla_longhorn.modules.rows import Rows
from fla_longhorn.ops.plain import is_transformed

# a position before all tokens: no token sees it, and a window drops it first
PADDING = -2**30


class Rotary(RotaryEmbedding):
    """:class:`fla.modules.RotaryEmbedding`, in PyTorch where fla's kernel cannot run."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, seqlen_offset: int | torch.Tensor = 0, cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None, chunk_indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`q` `[B, T, H, D]` and `k`, rotated by their positions, which begin at `seqlen_offset`, one or `[N]`."""
        if not in_pytorch(q):
            return differentiable_once(super().forward(q, k, seqlen_offset, cu_seqlens, max_seqlen, chunk_indices), 'rotation')
        positions = torch.arange(q.shape[1], device=q.device)
        if cu_seqlens is not None:
            first = cu_seqlens[:-1] - seqlen_offset
            positions = positions - first.repeat_interleave(cu_seqlens.diff(), output_size=q.shape[1])
        else:
            positions = positions + (seqlen_offset[:, None] if isinstance(seqlen_offset, torch.Tensor) else seqlen_offset)
        # as fla's tables: angles in float32, also in a model of another dtype
        angles = positions.float()[..., None] * self._compute_inv_freq(q.device)
        cos, sin = (widen(x.to(q.dtype)) for x in (angles.cos(), angles.sin()))
        q, k = (rotary_embedding_ref(widen(x), cos, sin).to(x.dtype) for x in (q, k))
        return q, k


@cache
def load_attention() -> Any:
    """A copy of `fla.layers.attn`, with :class:`Rotary`, and with PyTorch's attention if flash_attn is missing.

    fla's own module is not changed, so that its other models raise as before.
    """
    spec: Any = importlib.util.spec_from_file_location(f'{__package__}._fla_attention', attn.__file__)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RotaryEmbedding = Rotary
    if module.flash_attn_func is None:
        module.flash_attn_func = flash_attention.flash_attn_func
        module.flash_attn_varlen_func = flash_attention.flash_attn_varlen_func
    return module


_Attention: Any = load_attention().Attention


class RowwiseAttention(Attention):
    """:class:`fla.layers.attn.Attention` with padding anywhere in the rows, also with a cache: see :func:`attend_padded`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # fla's own constructor raises without flash_attn
        self.__class__ = _Attention
        _Attention.__init__(self, *args, **kwargs)
        self.__class__ = RowwiseAttention

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Any = None,
        output_attentions: bool = False, use_cache: bool = False, rows: Rows | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """As fla's; `attention_mask` and `rows` as in Longhorn's layer."""
        if is_transformed(hidden_states):
            raise ValueError(
                f'layer {self.layer_idx} is an attention layer (config.attn), which forward mode and the transforms of '
                'torch.func (vmap, grad, jvp) can not differentiate: call the model outside of them'
            )
        if kwargs.get('cp_context') is not None:
            raise ValueError('cp_context must be None with attention layers (config.attn), which see one rank only')
        if not use_cache:
            # fla's attention updates any cache that it gets
            past_key_values = look_ahead(past_key_values)
        (B, T, _), seen = hidden_states.shape, 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        check_attention_mask(attention_mask, B, T, hidden_states.device, seen)
        if kwargs.get('cu_seqlens') is not None and keys_of(past_key_values, self.layer_idx) is not None:
            raise ValueError('cu_seqlens must be None with a filled cache in models with attention layers (config.attn)')
        if kwargs.get('cu_seqlens') is None:
            kept, attention_mask = padding_of(hidden_states, attention_mask, past_key_values, self.layer_idx, rows)
            if kept is not None:
                return attend_padded(self, hidden_states, kept, past_key_values), None, past_key_values
        return _Attention.forward(self, hidden_states, attention_mask, past_key_values, output_attentions, use_cache, **kwargs)


def padding_of(
    hidden_states: torch.Tensor, mask: torch.Tensor | None, cache: Any, layer_idx: int, rows: Rows | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which tokens `[B, T]` are not padding, `None` where fla's attention does for this call; and the mask that it gets.

    fla raises for several tokens with a filled cache and a mask. With a cache it counts positions from the end of a row, so
    keys are lost unless the padding is on the left. For a single token it reads the mask on the host.
    """
    B, T, _ = hidden_states.shape
    past = keys_of(cache, layer_idx)
    if past is not None and len(past) == 3 and mask is None:
        return torch.ones(B, T, dtype=torch.bool, device=hidden_states.device), None
    if mask is None:
        return None, None
    kept = mask[:, -T:] != 0
    if T == 1 or not has_values(hidden_states) or (past is not None and len(past) == 3):
        return kept, None
    known = (kept.cpu() if rows is None or rows.mask is None else rows.mask[:, -T:])
    if known.all():
        return None, None
    # fla counts all columns between two tokens, so a row with gaps needs `kept`
    gaps = (known[:, 1:] > known[:, :-1]) & (known.cumsum(1)[:, :-1] > 0)
    return (kept, None) if cache is not None or gaps.any() or not known.any() else (None, mask[:, -T:])


def attend_padded(layer: Any, hidden_states: torch.Tensor, kept: torch.Tensor, cache: Any) -> torch.Tensor:
    """Attention of padded rows: each token sees the tokens of its row, whose positions are counted without the padding.

    From the first padding on, a cache holds positions `[B, S, 1]` beside keys and values. With a window it holds the last
    tokens of each row, wherever its padding was. One token is read without a wait for the device.

    Args:
        kept (torch.Tensor):
            `[B, T]`, false for padding.
    """
    T, window, i = hidden_states.shape[1], layer.window_size, layer.layer_idx
    q, k, v = (p(hidden_states).unflatten(-1, (-1, layer.head_dim)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.qk_norm:
        q, k = layer.q_norm(q), layer.k_norm(k)
    seen, past = 0 if cache is None else cache.get_seq_length(i), keys_of(cache, i)
    if past is not None and len(past) == 2:
        columns = torch.arange(seen - past[0].shape[1], seen, dtype=torch.int32, device=q.device)
        past = (*past, columns[None, :, None].expand(len(q), -1, -1))
    position = kept.cumsum(1, dtype=torch.int32) - 1
    if past is not None:
        position = position + past[2].amax(1).clamp_min(-1) + 1
    position = torch.where(kept, position, PADDING)
    q, k = layer.rotary(
        q.flatten(0, 1)[:, None], k.flatten(0, 1)[:, None], seqlen_offset=position.clamp_min(0).flatten(),
        max_seqlen=max(seen + T, layer.max_position_embeddings or 0),
    )
    q, k = (x.view(len(hidden_states), T, -1, layer.head_dim) for x in (q, k))
    new = (k.flatten(-2), v.flatten(-2), position[..., None])
    tokens = new if past is None else tuple(torch.cat(pair, 1) for pair in zip(past, new, strict=True))
    if cache is not None:
        last = keep_last(tokens, window)
        cache.update(layer_idx=i, offset=T, cache_kwargs={'window_size': window})['attn_state'] = last
        tokens = last if T == 1 else tokens
    k, v = (x.unflatten(-1, (-1, layer.head_dim)) for x in tokens[:2])
    if T == 1 or not has_values(hidden_states):
        distance = position[:, :, None] - tokens[2].transpose(1, 2)
        visible = (distance < (-PADDING if window is None else window)) & (distance >= 0 if T > 1 else True)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible[:, None],
            enable_gqa=bool(q.shape[2] != k.shape[2]),
        ).transpose(1, 2)
        o = torch.where(kept[..., None, None], o, 0)
    else:
        o = attend_unpadded(q, k, v, kept, tokens[2][..., 0] != PADDING, window)
    return layer.o_proj(o.flatten(-2).to(hidden_states.dtype))


def attend_unpadded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: torch.Tensor, of_k: torch.Tensor, window: int | None,
) -> torch.Tensor:
    """flash_attn on the tokens without padding, by the masks `[B, T]` of the queries and `[B, S]` of the keys."""
    at_q, at_k = (x.flatten().nonzero().flatten() for x in (of_q, of_k))
    if not len(at_q):
        return torch.zeros_like(q)
    q, k, v = (index_first_axis(x.flatten(0, 1), at) for x, at in ((q, at_q), (k, at_k), (v, at_k)))
    bounds = [F.pad(x.sum(1).cumsum(0), (1, 0)).int() for x in (of_q, of_k)]
    o = load_attention().flash_attn_varlen_func(
        q, k, v, *bounds, of_q.shape[1], of_k.shape[1], causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return pad_input(o, at_q, *of_q.shape)


def keys_of(cache: Any, layer_idx: int) -> Any:
    """Keys and values in a cache, and positions if there was padding."""
    return cache[layer_idx]['attn_state'] if cache is not None and cache.get_seq_length(layer_idx) else None


def keep_last(tokens: tuple[torch.Tensor, ...], window: int | None) -> tuple[torch.Tensor, ...]:
    """Of keys, values and positions `[B, S, ...]`, each row's last `window` tokens in their order."""
    if window is None or tokens[2].shape[1] <= window:
        return tokens
    # padding has negative positions, so the sort puts it first
    last = tokens[2].argsort(dim=1, stable=True)[:, -window:]
    return tuple(x.take_along_dim(last, 1) for x in tokens)


def attention_options(config: Any, layer_idx: int) -> dict[str, Any] | None:
    """Arguments of fla's `Attention` for layer `layer_idx`, from `config.attn`; `None` for a layer without attention."""
    spec = get_attention_spec(getattr(config, 'attn', None), layer_idx=layer_idx)
    if spec is None:
        return None
    options = {name: spec[name] for name in ('num_heads', 'num_kv_heads', 'qkv_bias', 'window_size', 'rope_theta')}
    return dict(
        hidden_size=config.hidden_size, max_position_embeddings=config.max_position_embeddings, layer_idx=layer_idx, **options,
    )
