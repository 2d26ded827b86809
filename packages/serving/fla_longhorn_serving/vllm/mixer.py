"""The Longhorn layer on vLLM's flat batches, with each request's memory in a page of vLLM's pool.

A page holds the convolution's last `conv_size - 1` inputs and the recurrence's state `[H, K, V]`. The op reads and writes it
in place. Under tensor parallelism a rank has an equal part of the channels: whole heads, or a part of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.mamba import mamba_mixer  # noqa: F401  registers torch.ops.vllm.mamba_mixer
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateDtypeCalculator,
    MambaStateShapeCalculator,
    is_conv_state_dim_first,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from fla_longhorn.hosts import Pool, TokenLoops, find_loops, log_decays, rank_of
from fla_longhorn.models import LonghornConfig
from fla_longhorn.ops import longhorn_state_update
from fla_longhorn_serving.vllm.convolution import convolve
from fla_longhorn_serving.vllm.speculative import DraftBackend, DraftMetadata, Pages

# vLLM has kernels for these sizes of the convolution
CONV_SIZES = (2, 3, 4)
# of :class:`fla_longhorn.modules.L2Norm`
KEY_EPS = 1e-6


def token_loops() -> TokenLoops | None:
    """What a package for the CPU has for decoded tokens, if it is installed and not switched off."""
    loops = find_loops()
    return None if loops is None else loops.of_token()


def mix_tokens(*args: Any) -> torch.Tensor | None:
    """A layer's tokens between its first and its last projection, in one loop; None where there is none for them."""
    loops = token_loops()
    return None if loops is None else loops.mix_tokens(*args)


def channels(config: LonghornConfig) -> int:
    return round(config.hidden_size * config.expand)


def local_heads(config: LonghornConfig, tp_size: int) -> int:
    """How many heads a rank has a part of.

    Raises:
        ValueError: the channels can't be divided so that a rank has whole heads or a part of one.
    """
    heads, size = config.num_heads, channels(config)
    if size % tp_size or (heads % tp_size and tp_size % heads):
        raise ValueError(f'tensor_parallel_size must divide the {size} channels and divide, or be a multiple of, '
                         f'num_heads = {heads}, got {tp_size}')
    return max(1, heads // tp_size)


def state_shape(config: LonghornConfig, tp_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a page: the convolution's inputs, and the state `[H, K, V]` of this rank's heads."""
    if config.conv_size not in CONV_SIZES:
        raise ValueError(f'conv_size must be one of {list(CONV_SIZES)} for vLLM, got {config.conv_size}')
    heads, size, K = local_heads(config, tp_size), channels(config), config.state_size
    conv, _ = MambaStateShapeCalculator.mamba1_state_shape(
        tp_world_size=tp_size, intermediate_size=size, state_size=K, conv_kernel=config.conv_size,
    )
    return conv, (heads, K, size // tp_size // heads)


def state_dtype(vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
    """The state is float32 whatever the model's dtype, unless `mamba_cache_dtype` or `mamba_ssm_cache_dtype` differs."""
    cache = vllm_config.cache_config
    of_state = 'float32' if cache.mamba_cache_dtype == cache.mamba_ssm_cache_dtype == 'auto' else cache.mamba_ssm_cache_dtype
    return MambaStateDtypeCalculator.mamba1_state_dtype(vllm_config.model_config.dtype, cache.mamba_cache_dtype, of_state)


def sharded(*shape: int) -> nn.Parameter:
    """A parameter whose first dimension is divided among the ranks."""
    parameter = nn.Parameter(torch.empty(shape, dtype=torch.get_default_dtype()))
    set_weight_attrs(parameter, {'weight_loader': load_shard})
    return parameter


def load_shard(parameter: nn.Parameter, loaded: torch.Tensor) -> None:
    """This rank's part of the first dimension."""
    parameter.data.copy_(loaded.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()])


class Piece(NamedTuple):
    """Tokens of a batch that take one call: one of each decoding request, or all of the prompts."""

    # the tokens' places in the batch
    places: slice | torch.Tensor
    # the pages of the states before and after them
    pages: Pages
    # boundaries and starts of the prompts, which the recurrence takes; None for decoding requests
    sequences: dict[str, torch.Tensor] | None = None


def pieces_of(metadata: Any) -> list[Piece]:
    """In the order of the batch. Layers share the metadata of a step, which keeps them."""
    if not hasattr(metadata, 'longhorn_pieces'):
        metadata.longhorn_pieces = find_pieces(metadata)
    return metadata.longhorn_pieces


def find_pieces(metadata: Any) -> list[Piece]:
    drafts, decoded = isinstance(metadata, DraftMetadata), metadata.num_decode_tokens
    if drafts:
        pieces = [Piece(places, pages) for places, pages in metadata.steps]
    elif decoded:
        rows = metadata.state_indices_tensor_d[:, 0]
        pieces = [Piece(slice(decoded), (rows, rows))]
    else:
        pieces = []
    if metadata.num_prefill_tokens:
        rows = metadata.state_indices_tensor_p
        sequences = {'cu_seqlens': metadata.query_start_loc_p, 'has_initial_state': metadata.has_initial_states_p}
        pages = metadata.pages_p if drafts else (rows, rows)
        pieces.append(Piece(slice(decoded, decoded + metadata.num_prefill_tokens), pages, sequences))
    return pieces


def apply_to_pieces(
    pieces: list[Piece], function: Callable[[Piece, dict[str, torch.Tensor]], torch.Tensor], tokens: dict[str, torch.Tensor],
) -> torch.Tensor:
    """What `function` returns for the tokens of each piece, `[T, channels]`, in their order in the batch."""
    if len(pieces) == 1:
        return function(pieces[0], tokens)
    found: list[torch.Tensor] = [
        function(piece, {name: x[piece.places] for name, x in tokens.items()}) for piece in pieces
    ]
    y = found[0].new_empty(sum(map(len, found)), found[0].shape[-1])
    for piece, some in zip(pieces, found, strict=True):
        y[piece.places] = some
    return y


class KeepsWeight(UnquantizedLinearMethod):
    """vLLM's, which on a CPU packs a weight and drops it; the loop for decoded tokens reads it as it was, `layer.kept`."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.kept = layer.weight.data
        super().process_weights_after_loading(layer)


class LonghornGate(nn.Module):
    """:class:`fla_longhorn.layers.gate.Gate` for a rank's channels `[T, channels]`; decays of channels are split too."""

    def __init__(self, config: LonghornConfig, quant: Any, prefix: str) -> None:
        super().__init__()
        size, tp_size = channels(config), get_tensor_model_parallel_world_size()
        rank, heads, self.by_head = rank_of(config.beta_rank, config.hidden_size), config.num_heads, config.gate == 'head'
        self.down = RowParallelLinear(size, rank, bias=False, quant_config=quant, prefix=f'{prefix}.down')
        self.up = ColumnParallelLinear(
            rank, heads if self.by_head else size, bias=False, disable_tp=self.by_head, quant_config=quant,
            prefix=f'{prefix}.up',
        )
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.get_default_dtype()))
        self.dt_bias = nn.Parameter(torch.empty_like(self.A_log)) if self.by_head else sharded(size // tp_size)

    def forward(self, x: torch.Tensor, own: slice) -> torch.Tensor:
        """Logarithms of the decays of the heads `own`, in float32: `[T, H]`, or `[T, H, V]`."""
        # kernels of adapters need it contiguous
        g = self.up(self.down(x)[0].contiguous())[0].unsqueeze(0)
        if self.by_head:
            return log_decays(g, self.A_log, self.dt_bias)[0, :, own]
        A_log = self.A_log[own]
        return log_decays(g.unflatten(-1, (len(A_log), -1)), A_log, self.dt_bias)[0]


class LonghornMixer(nn.Module, MambaBase):
    """:class:`fla_longhorn.layers.Longhorn` for tokens `[T, hidden_size]`: those of decoding requests, then prompts."""

    mamba_type = MambaAttentionBackendEnum.MAMBA1

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant = vllm_config.model_config.hf_config, vllm_config.quant_config
        # reading an attribute of a configuration takes as long as a small operation
        self.config, self.vllm_config, self.prefix = config, vllm_config, prefix
        self.exact, self.allow_neg_eigval, self.scalar_beta = config.exact, config.allow_neg_eigval, config.scalar_beta
        self.normalises_keys, self.state_size, self.all_heads = config.k_norm == 'l2', config.state_size, config.num_heads
        tp_size, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        hidden_size, size = config.hidden_size, channels(config)
        self.num_heads = local_heads(config, tp_size)
        # the first of them, among the model's
        self.first_head = rank * config.num_heads // tp_size
        self.beta_rank = rank_of(config.beta_rank, hidden_size)
        self.x_sizes = [self.beta_rank, *[config.num_heads * config.state_size] * (1 if config.tie_qk else 2)]

        self.in_proj = MergedColumnParallelLinear(
            hidden_size, [size] * 2, bias=config.use_bias, quant_config=quant, prefix=f'{prefix}.in_proj',
        )
        self.conv1d: Any = nn.Module()
        self.conv1d.weight = sharded(size // tp_size, 1, config.conv_size)
        self.conv1d.register_parameter('bias', sharded(size // tp_size) if config.conv_bias else None)
        self.x_proj = RowParallelLinear(
            size, sum(self.x_sizes), bias=False, quant_config=quant, prefix=f'{prefix}.x_proj',
        )
        self.v_proj = ColumnParallelLinear(
            size, size, bias=False, quant_config=quant, prefix=f'{prefix}.v_proj',
        ) if config.value_proj else None
        # one step size for each head, which every rank has, or for each channel
        self.beta_proj = ColumnParallelLinear(
            self.beta_rank, config.num_heads if config.scalar_beta else size, bias=True, disable_tp=config.scalar_beta,
            quant_config=quant, prefix=f'{prefix}.beta_proj',
        )
        self.gate = LonghornGate(config, quant, f'{prefix}.gate') if config.gate else None
        self.D = sharded(size // tp_size)
        self.out_proj = RowParallelLinear(
            size, hidden_size, bias=config.use_bias, quant_config=quant, prefix=f'{prefix}.out_proj',
        )

        if tp_size == 1 and self.v_proj is None and current_platform.is_cpu():
            of_gate = () if self.gate is None else (self.gate.down, self.gate.up)
            for layer in (self.x_proj, self.beta_proj, *of_gate):
                if type(layer.quant_method) is UnquantizedLinearMethod:
                    layer.quant_method = KeepsWeight()

        # vLLM puts the pools of this layer here
        none = torch.empty(0, dtype=torch.float32, device='cpu')
        self.kv_cache = (none, none)
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f'prefix must be new, got {prefix!r} twice')
        layers[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return state_shape(self.config, get_tensor_model_parallel_world_size())

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        return state_dtype(self.vllm_config)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return DraftBackend if self.vllm_config.num_speculative_tokens else super().get_attn_backend()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What lies between the first and the last projection is vLLM's own op, which its compiler does not look into."""
        projected = self.in_proj(hidden_states)[0]
        y = projected.new_empty(len(projected), projected.shape[1] // 2)
        torch.ops.vllm.mamba_mixer(projected, y, _encode_layer_name(self.prefix))
        return self.out_proj(y)[0]

    def forward_impl(self, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        """Called by the op: from `in_proj`'s output `[T, 2 * channels]` to `out_proj`'s input `[T, channels]`."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # a run that measures memory, before there are pages
            return
        metadata = metadata[self.prefix]
        pieces, total = pieces_of(metadata), metadata.num_decode_tokens + metadata.num_prefill_tokens
        if not pieces:
            return
        if total < len(output):
            hidden_states, output = hidden_states[:total], output[:total]
        x, z = hidden_states.chunk(2, dim=-1)
        mixer = self.mixer()
        if mixer is not None:
            y = apply_to_pieces(pieces, partial(self.mix, metadata, mixer), {'x': x, 'z': z})
        else:
            # adapters know a token by its place in the batch, so that projections take all tokens
            x = apply_to_pieces(pieces, partial(self.convolve, metadata), {'x': x})
            y = apply_to_pieces(pieces, self.update, self.inputs(x, z))
        output.copy_(y)

    def mixer(self) -> Any:
        """For :meth:`mix`, on a CPU with loops for it and without adapters, quantised weights or other ranks; else None."""
        x_proj, beta_proj, conv, gate = self.x_proj, self.beta_proj, self.conv1d, self.gate
        projections = (x_proj, beta_proj) if gate is None else (x_proj, beta_proj, gate.down, gate.up)
        weights = [vars(x).get('kept') for x in projections]
        loops = token_loops()
        if loops is None or any(x is None for x in weights):
            return None
        # vLLM widens the bias for some of its kernels
        bias = beta_proj.bias.to(weights[1].dtype)
        return loops.Mixer(
            conv.weight, conv.bias, weights[0], weights[1], bias, self.D,
            self.num_heads, self.state_size, self.exact, self.allow_neg_eigval, KEY_EPS if self.normalises_keys else None,
            None if gate is None else (weights[2], weights[3], gate.A_log, gate.dt_bias),
        )

    def mix(self, metadata: Any, mixer: Any, piece: Piece, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        """From x and z of a piece to `y`: decoded tokens in one loop, if there is one for them."""
        if piece.sequences is None:
            before, after = piece.pages
            pool = Pool(self.kv_cache[1], before, None if after is before else after, None, NULL_BLOCK_ID)
            y = mix_tokens(tokens['x'], tokens['z'], mixer, self.conv_pages, pool)
            if y is not None:
                return y
        return self.update(piece, self.inputs(self.convolve(metadata, piece, tokens), tokens['z']))

    @property
    def conv_pages(self) -> torch.Tensor:
        """`[P, conv_size - 1, channels]`."""
        pages = self.kv_cache[0]
        return pages.transpose(1, 2) if is_conv_state_dim_first() else pages

    def convolve(self, metadata: Any, piece: Piece, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        conv = self.conv1d
        return convolve(
            tokens['x'], self.conv_pages, conv.weight.squeeze(1), conv.bias, piece.pages, piece.sequences, metadata,
        )

    def update(self, piece: Piece, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        """The recurrence from the states in the first pages to those in the second, which may be the same."""
        (before, after), states, sequences = piece.pages, self.kv_cache[1], piece.sequences
        if sequences is not None:
            # all tokens in one row, with the boundaries of the prompts
            tokens = {**{name: x.transpose(0, 1) for name, x in tokens.items()}, **sequences}
        inputs: dict[str, Any] = dict(
            tokens, D=self.D.view(self.num_heads, -1), exact=self.exact, use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
        )
        if states.dtype == torch.float32:
            o = longhorn_state_update(
                states, **inputs, state_indices=before, final_state_indices=None if after is before else after,
                pad_slot_id=NULL_BLOCK_ID,
            )
        else:
            # 16 bits are for storage
            wide = states[before].float()
            o = longhorn_state_update(wide, **inputs)
            states[after] = wide.to(states.dtype)
        return o.view(-1, o.shape[-2] * o.shape[-1])

    def inputs(self, x: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
        """The op's `q` and `k` `[T, 1, H, K]`, what has a number for each channel, `[T, 1, H, V]`, or for each head."""
        own = slice(self.first_head, self.first_head + self.num_heads)
        # `split` takes twice as long
        beta, k, *q = self.x_proj(x)[0].split_with_sizes(self.x_sizes, dim=-1)
        # kernels of adapters need it contiguous
        beta = self.beta_proj(beta.contiguous())[0]
        beta = beta[:, None, own] if self.scalar_beta else self.by_head(beta)
        q, k = (y.view(-1, 1, self.all_heads, self.state_size) for y in (q[0] if q else k, k))
        if self.num_heads < self.all_heads:
            q, k = q[:, :, own], k[:, :, own]
        if self.normalises_keys:
            wide = k.float()
            k = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + KEY_EPS)).to(k.dtype)
        g = {} if self.gate is None else {'g': self.gate(x, own).unsqueeze(1)}
        if self.v_proj is not None:
            x = self.v_proj(tensor_model_parallel_all_gather(x))[0]
        return {'q': q, 'k': k, 'v': self.by_head(x), 'beta': beta, 'z': self.by_head(z), **g}

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        # `unflatten` takes three times as long
        return x.view(-1, 1, self.num_heads, x.shape[-1] // self.num_heads)
