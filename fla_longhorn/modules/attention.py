"""fla's attention for Longhorn's models: also without flash_attn, and with padding beside a cache."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from fla.layers.attn import Attention
from fla.models.cache_utils import FLACache
from fla.models.configuration_utils import get_attention_spec

from fla_cpu import flash_attention
from fla_cpu.plain import under_transform
from fla_longhorn.modules.tensor_parallel import local_kv_dim


def load_again(name: str) -> ModuleType:
    """A copy of a module of fla, with PyTorch's attention if flash_attn is missing; fla's own module is not changed."""
    copy = f'{__package__}._{name.replace(".", "_")}'
    if copy not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(copy, importlib.import_module(name).__file__)
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if module.flash_attn_func is None:
            module.flash_attn_func = flash_attention.flash_attn_func
            module.flash_attn_varlen_func = flash_attention.flash_attn_varlen_func
        sys.modules[copy] = module
    return sys.modules[copy]


_Attention: Any = load_again('fla.layers.attn').Attention


class RowwiseAttention(Attention):
    """:class:`fla.layers.attn.Attention` with padding anywhere in the rows, also with a cache.

    fla raises for several tokens with a filled cache and a mask. With a cache it counts positions from the end of a row, so
    keys are lost unless the padding is on the left. Such rows run one by one here, without padding. For a single token, fla
    reads the mask on the host; this class does not.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # fla's own constructor raises without flash_attn
        self.__class__ = _Attention
        _Attention.__init__(self, *args, **kwargs)
        self.__class__ = RowwiseAttention

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Any = None,
        output_attentions: bool = False, use_cache: bool = False, **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """As fla's; `attention_mask` `[B, tokens in the cache + T]`."""
        if under_transform():
            raise ValueError(
                f'layer {self.layer_idx} is an attention layer (config.attn), which the transforms of torch.func (vmap, grad, '
                'jvp) can not differentiate: call the model outside of them'
            )
        if kwargs.get('cp_context') is not None:
            raise ValueError('cp_context must be None with attention layers (config.attn), which see one rank only')
        kv_dim = local_kv_dim(self)
        T, cache, rows = hidden_states.shape[1], past_key_values, kwargs.pop('rows', None)
        if attention_mask is not None and kwargs.get('cu_seqlens') is None and not torch.compiler.is_compiling():
            if T == 1:
                return self._read_token(hidden_states, attention_mask, cache), None, cache
            kept = attention_mask.cpu() != 0 if rows is None or rows.mask is None else rows.mask
            seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
            if seen or has_gaps(kept, at_the_end=cache is not None) or not kept.any():
                if cache is not None:
                    self._check_window(kept[:, :-T] if seen else kept)
                return self._by_rows(hidden_states, kept, seen, cache, kv_dim, **kwargs), None, cache
        return _Attention.forward(self, hidden_states, attention_mask, cache, output_attentions, use_cache, **kwargs)

    def _read_token(self, hidden_states: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
        """Attention of one token per row, without reading the mask on the host."""
        q, k, v = (p(hidden_states).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        # padding has no position
        position = mask.sum(-1, dtype=torch.int32) - 1
        q, k = self.rotary(q, k, seqlen_offset=position, max_seqlen=max(seen + 1, self.max_position_embeddings or 0))
        if cache is not None:
            states = cache.update(
                attn_state=(k.flatten(-2), v.flatten(-2)), layer_idx=self.layer_idx, offset=1,
                cache_kwargs={'window_size': self.window_size},
            )['attn_state']
            k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in states)
        kept = mask[:, -k.shape[1]:] != 0
        # a row without any key would be 0/0
        visible = torch.cat([kept[:, :-1], torch.ones_like(kept[:, -1:])], 1)[:, None, None]
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible, enable_gqa=self.num_kv_groups > 1,
        )
        return self.o_proj(torch.where(kept[:, -1:, None], o.transpose(1, 2).flatten(-2), 0))

    def _check_window(self, kept: torch.Tensor) -> None:
        """Raise if a window's columns in the cache, of which some are padding, lack tokens that the window covers."""
        if self.window_size is None:
            return
        known = kept[:, -self.window_size:].sum(1)
        if (known < kept.sum(1).clamp_max(self.window_size - 1)).any():
            raise ValueError(
                'attention_mask must not have padding behind tokens among the last '
                f'window_size = {self.window_size} columns before a call, which layer {self.layer_idx} keeps, got some'
            )

    def _by_rows(
        self, hidden_states: torch.Tensor, kept: torch.Tensor, seen: int, cache: Any, kv_dim: int, **kwargs: Any,
    ) -> torch.Tensor:
        B, T, _ = hidden_states.shape
        window = {'window_size': self.window_size}
        output = torch.zeros_like(hidden_states)
        new = [hidden_states.new_zeros(B, T, kv_dim) for _ in range(2)]
        past = cache[self.layer_idx]['attn_state'] if seen else new
        before, own = kept[:, :kept.shape[1] - T], kept[:, -T:]
        # a window keeps only the last columns
        known = before[:, -past[0].shape[1]:]
        for i in range(B):
            columns = own[i].nonzero().flatten()
            if not len(columns):
                continue
            row = FLACache()
            if before[i].any():
                state = tuple(x[i:i + 1, known[i]] for x in past)
                row.update(attn_state=state, layer_idx=self.layer_idx, cache_kwargs=window)
                # the position of the next token
                row.layers[self.layer_idx]._seen_tokens = int(before[i].sum())
            one = hidden_states[i:i + 1, columns]
            output[i, columns] = _Attention.forward(self, one, None, row, use_cache=True, **kwargs)[0][0]
            states = row[self.layer_idx]['attn_state']
            stored = columns[-states[0].shape[1]:]
            for j, state in enumerate(states):
                new[j] = new[j].to(state.dtype)
                new[j][i, stored] = state[0, state.shape[1] - len(stored):]
        if cache is not None:
            cache.update(attn_state=tuple(new), layer_idx=self.layer_idx, offset=T, cache_kwargs=window)
        return output


def attention_options(config: Any, layer_idx: int) -> dict[str, Any] | None:
    """Arguments of fla's `Attention` for layer `layer_idx`, from `config.attn`; `None` for a layer without attention."""
    spec = get_attention_spec(getattr(config, 'attn', None), layer_idx=layer_idx)
    if spec is None:
        return None
    options = {name: spec[name] for name in ('num_heads', 'num_kv_heads', 'qkv_bias', 'window_size', 'rope_theta')}
    return dict(
        hidden_size=config.hidden_size, max_position_embeddings=config.max_position_embeddings, layer_idx=layer_idx, **options,
    )


def has_gaps(kept: torch.Tensor, at_the_end: bool) -> bool:
    """Whether a row has padding between tokens; with `at_the_end`, also after them."""
    if at_the_end:
        return bool((kept[:, 1:] < kept[:, :-1]).any())
    return bool(((kept[:, 1:] > kept[:, :-1]) & (kept.cumsum(1)[:, :-1] > 0)).any())
