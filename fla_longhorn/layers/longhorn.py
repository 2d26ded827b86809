"""The Longhorn layer: the authors' block, which is Mamba's with the selective scan replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from fla.layers.utils import get_layer_cache, update_layer_cache

from fla_longhorn.layers.gate import Gate
from fla_longhorn.layers.options import check_options, rank_of
from fla_longhorn.layers.states import read_states
from fla_longhorn.layers.weight_decay import NoWeightDecay
from fla_longhorn.modules import L2Norm
from fla_longhorn.modules.bare import is_bare
from fla_longhorn.modules.boundaries import check_keywords, find_rows
from fla_longhorn.modules.context_parallel import convolve_part
from fla_longhorn.modules.convolution import ShortConvolution
from fla_longhorn.modules.recompute import Values
from fla_longhorn.modules.rows import WHOLE, Rows, Unpadded
from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update
from fla_longhorn.ops.backends import token_loops
from fla_longhorn.ops.plain import is_recorded, is_transformed
from fla_longhorn.ops.update import MAX_RECURRENT_LENGTH

if TYPE_CHECKING:
    from fla.models.utils import Cache
    from fla.ops.cp import FLACPContext

OPS = {'chunk': chunk_longhorn, 'fused_recurrent': fused_recurrent_longhorn}


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """What PyTorch's function returns outside of a trace: in one of torch 2.11 it is true under any compiler."""
    return torch.compiler.is_exporting()


class Longhorn(NoWeightDecay):
    r"""Longhorn token mixer (arXiv 2407.14207, section 3.3 and Algorithm 1).

    .. math::
        x, z = W_{in} h, \quad v = \mathrm{silu}(\mathrm{conv}(x)), \quad [b, k, q] = W_x v, \quad
        \beta = \sigma(W_\beta b + c_\beta), \\
        o = W_{out} \big( (q^\top S(k, v, \beta) + D \odot v) \odot \mathrm{silu}(z) \big)

    Args:
        mode (str, Optional):
            Op for more than 64 tokens, `chunk` or `fused_recurrent`; fewer always use the latter. Default: `'chunk'`.
        hidden_size (int, Optional):
            Width of the input and output. Default: 768.
        state_size (int, Optional):
            Memory entries per channel (K; the paper's m), 1 to 256. Default: 16.
        expand (float, Optional):
            Channels of the mixer (the paper's d) as a multiple of `hidden_size`. Default: 2.
        num_heads (int, Optional):
            Groups of channels, each with its own queries and keys. Default: 1.
        conv_size (int, Optional):
            Width of the causal convolution. Default: 4.
        conv_bias (bool, Optional):
            Whether the convolution has a bias. Default: `True`.
        beta_rank (int or str, Optional):
            Rank of the projection to the step sizes; `'auto'` is `ceil(hidden_size / 16)`. Default: `'auto'`.
        use_bias (bool, Optional):
            Whether `in_proj` and `out_proj` have a bias. Default: `False`.
        exact (bool, Optional):
            Whether the update is exact (Theorem 3.1) instead of the diagonal approximation (Eq. 7). Default: `False`.
        scalar_beta (bool, Optional):
            Whether there is one step size per head instead of one per channel. Default: `False`.
        k_norm (str, Optional):
            `'l2'` normalises each head's key, `k / sqrt(|k|^2 + 1e-6)`, in float32, and not the queries. Default: `None`.
        tie_qk (bool, Optional):
            Whether the queries are the projected keys, before any norm, instead of having their own projection.
            Default: `False`.
        value_proj (bool, Optional):
            Whether the values are a linear map of the convolution's output, `v = W_v silu(conv(x))`, instead of that output,
            from which the other projections are computed in both cases. Default: `False`.
        recompute (bool, Optional):
            Whether backward recomputes the convolution's output and the step sizes: the same gradients, with 4 bytes less per
            token and channel in 16-bit training, where neither part is adapted or hooked and no cache is read or kept. Under
            `torch.compile` the compiler chooses. False is the operator's `disable_recompute` too, which rounds more.
            Default: `True`.
        norm_eps (float, Optional):
            Unused, accepted because fla's layers have it. Default: 1e-5.
        layer_idx (int, Optional):
            Index of the layer, needed with a cache. Default: `None`.
        allow_neg_eigval (bool, Optional):
            Whether step sizes are twice as large, so that a token with `beta |k|^2 > 1` flips the sign of the value stored
            under its key. With `k_norm='l2'` it only writes more, and warns. Default: `False`.
        gate (str, Optional):
            Whether the memory decays before each step, by one :class:`fla_longhorn.layers.gate.Gate` for each `'head'` or
            each `'channel'`. Default: `None`, as in the paper.

    The defaults are the paper's.
    """

    no_weight_decay = ('D',)
    # keywords of `forward` that a host model passes to all its mixers
    ignored_keywords: tuple[str, ...] = ()

    def __init__(
        self,
        mode: str = 'chunk',
        hidden_size: int = 768,
        state_size: int = 16,
        expand: float = 2,
        num_heads: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        beta_rank: int | str = 'auto',
        use_bias: bool = False,
        exact: bool = False,
        scalar_beta: bool = False,
        k_norm: str | None = None,
        tie_qk: bool = False,
        value_proj: bool = False,
        recompute: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        allow_neg_eigval: bool = False,
        gate: str | None = None,
    ) -> None:
        check_options(**{name: x for name, x in locals().items() if name not in ('self', '__class__')})
        super().__init__()
        intermediate_size = round(hidden_size * expand)

        self.mode = mode
        self.hidden_size = hidden_size
        self.state_size = state_size
        self.expand = expand
        self.num_heads = num_heads
        self.intermediate_size = intermediate_size
        self.head_v_dim = intermediate_size // num_heads
        self.beta_rank = rank_of(beta_rank, hidden_size)
        self.exact = exact
        self.scalar_beta = scalar_beta
        self.allow_neg_eigval = allow_neg_eigval
        self.conv_size = conv_size
        self.tie_qk = tie_qk
        self.recompute = recompute
        self.norm_eps = norm_eps
        self.layer_idx = layer_idx

        self.in_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=use_bias)
        self.conv1d = ShortConvolution(hidden_size=intermediate_size, kernel_size=conv_size, bias=conv_bias, activation='silu')
        self.x_sizes = [self.beta_rank, *[num_heads * state_size] * (1 if tie_qk else 2)]
        self.x_proj = nn.Linear(intermediate_size, sum(self.x_sizes), bias=False)
        # adapters look for modules of this name, so there is none without the projection
        self.v_proj = nn.Linear(intermediate_size, intermediate_size, bias=False) if value_proj else None
        self.beta_proj = nn.Linear(self.beta_rank, num_heads if scalar_beta else intermediate_size, bias=True)
        self.gate = Gate(
            intermediate_size, self.beta_rank, num_heads, self.head_v_dim if gate == 'channel' else None,
        ) if gate else None
        self.k_norm = L2Norm() if k_norm == 'l2' else nn.Identity()
        self.D = nn.Parameter(torch.ones(intermediate_size))
        self.out_proj = nn.Linear(intermediate_size, hidden_size, bias=use_bias)
        nn.init.zeros_(self.beta_proj.bias)

    def extra_repr(self) -> str:
        return (
            f'mode={self.mode}, state_size={self.state_size}, num_heads={self.num_heads}, '
            f'exact={self.exact}, scalar_beta={self.scalar_beta}, allow_neg_eigval={self.allow_neg_eigval}, '
            f'layer_idx={self.layer_idx}'
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        rows: Rows | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None, Cache | None]:
        """Mix tokens.

        Args:
            hidden_states (torch.Tensor):
                Input of shape `[B, T, hidden_size]`.
            attention_mask (torch.Tensor, Optional):
                Mask of zeros and ones, of shape `[B, T]` and any dtype, or up to `[B, n + T]` with the n tokens that
                `past_key_values` has read. Padding, marked 0, does not change the state and gets output 0. Default: `None`.
            past_key_values (Cache, Optional):
                fla's cache, to continue from. Default: `None`.
            use_cache (bool, Optional):
                Whether to store the state after the last token in `past_key_values`, which does not change otherwise.
                Default: `False`.
            output_attentions (bool, Optional):
                Ignored: there is no attention matrix. Default: `False`.
            rows (Rows, Optional):
                What a model found for all its layers in the mask and in the keywords below. Default: `None`.
            cu_seqlens, cu_seqlens_cpu (torch.Tensor, Optional):
                Boundaries `[N + 1]` of sequences packed into one row, which win over `attention_mask`, and a copy on the CPU,
                which saves reading those on a GPU.
            cu_seq_lens_q, cu_seq_lens_k, position_ids, seq_idx (torch.Tensor, Optional):
                The same boundaries as transformers and TRL pass them: `[N + 1]` twice, positions `[B, T]` that restart with
                each sequence, and the index `[B, T]` of each token's sequence. They must agree.
            cp_context (FLACPContext, Optional):
                fla's context of this rank, from `fla.ops.cp.build_cp_context`, with the boundaries; `hidden_states`
                `[1, T, hidden_size]` are this rank's tokens. Not with a mask or a cache.

        Returns:
            `(o, None, past_key_values)` with `o` of the shape of `hidden_states`.

        Raises:
            ValueError: a mask, boundaries or a cache do not fit the input or each other.
            TypeError: an unknown keyword.
        """
        B, T, _ = hidden_states.shape
        if not (torch.compiler.is_compiling() or hidden_states.numel()):
            raise ValueError(
                f'hidden_states must have the shape [B, T, {self.hidden_size}] with at least one row and one token, '
                f'got {list(hidden_states.shape)}'
            )
        check_keywords(f'{type(self).__name__}.forward', kwargs, self.ignored_keywords)
        use_cache, last_state = bool(use_cache), get_layer_cache(self, past_key_values)
        if rows is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
            rows, kwargs = find_rows(kwargs, B, T, hidden_states.device, attention_mask, seen)
        rows = WHOLE if rows is None else rows.to(hidden_states.device)
        if isinstance(rows, Unpadded):
            # an adapter may belong to a row, and a hook may look at one
            rows = rows if all(is_bare(part, hidden_states.device) for part in self.parts()) else rows.in_place
        recurrent_state, conv_state = read_states(self, last_state, rows.count(B))
        cp_context = kwargs.get('cp_context')
        if cp_context is not None and (attention_mask is not None or use_cache or recurrent_state is not None):
            raise ValueError('cp_context takes packed sequences from their start, so attention_mask must be None, and '
                             'use_cache False: pass it in the call, or call model.train()')

        x, z = self.in_proj(rows.enter(hidden_states)).chunk(2, dim=-1)
        # a CUDA graph needs the state at the same address, unless something differentiates through it
        differentiated = torch.is_grad_enabled() or is_transformed()
        if (
            T == 1 and use_cache and not differentiated and recurrent_state is not None and conv_state is not None
            and not recurrent_state.requires_grad
        ):
            o, recurrent_state, conv_state = self.step(x, z, recurrent_state, conv_state, rows)
        else:
            recomputed = self.recompute and recurrent_state is None and not use_cache and is_recorded()
            with Values() if recomputed else nullcontext() as values:
                o, recurrent_state, conv_state = self.mix(
                    x,
                    z,
                    recurrent_state,
                    conv_state,
                    rows,
                    op=self.op_for(T),
                    use_cache=use_cache,
                    cp_context=cp_context,
                    values=values,
                )
        if use_cache:
            update_layer_cache(self, past_key_values, recurrent_state=recurrent_state, conv_state=conv_state, offset=T)
        o = self.out_proj(o.view(o.shape[0], o.shape[1], -1))
        return rows.leave(o), None, past_key_values

    def step(
        self, x: torch.Tensor, z: torch.Tensor, recurrent_state: torch.Tensor, conv_state: torch.Tensor, rows: Rows = WHOLE,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Decode a token per sequence, without gradients: from the halves of `in_proj`'s output, `[B, 1, d]`, to the input of
        `out_proj`, `[B, 1, H, d / H]`, and the states, which are updated in place (the recurrent one if it is float32)."""
        loops = token_loops(x) if type(rows) is Rows else None
        if loops is not None and (o := loops.mix_layer(self, x, z, conv_state, recurrent_state)) is not None:
            return o, recurrent_state, conv_state
        if (op := self.op_for(1)) is not fused_recurrent_longhorn:
            states: Any
            o, *states = self.mix(x, z, recurrent_state, conv_state, rows, op=op, use_cache=True)
            return o, recurrent_state.copy_(states[0]), states[1]
        x, conv_state = self.conv1d(x=x, cache=conv_state, output_final_state=True, **rows.of_convolution)
        recurrent_state = recurrent_state.float().contiguous()
        o = longhorn_state_update(
            recurrent_state,
            **self.inputs(x, rows),
            D=self.D.view(self.num_heads, -1),
            z=self.by_heads(z),
            cu_seqlens=rows.cu_seqlens,
            cu_seqlens_cpu=rows.cu_seqlens_cpu,
        )
        return o, recurrent_state, conv_state

    def mix(
        self, x: torch.Tensor, z: torch.Tensor, recurrent_state: torch.Tensor | None, conv_state: torch.Tensor | None,
        rows: Rows, *, op: Callable, use_cache: bool, cp_context: FLACPContext | None = None, values: Values | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """As :meth:`step`, of any number of tokens by `op`, with new states; `values` are recomputed in backward."""
        if cp_context is not None:
            y = convolve_part(self.conv1d, x, cp_context)
        else:
            y, conv_state = self.conv1d(x=x, cache=conv_state, output_final_state=use_cache, **rows.of_convolution)
            if values is not None and 'lengths' not in rows.of_convolution and is_bare(self.conv1d, x.device):
                function = partial(self.conv1d.convolve, **rows.of_convolution)
                values.add(y, function, x, self.conv1d.weight, self.conv1d.bias)
        o, recurrent_state = op(
            **self.inputs(y, rows, values),
            D=self.D.view(self.num_heads, -1),
            z=self.by_heads(z),
            initial_state=recurrent_state,
            output_final_state=use_cache,
            cu_seqlens=rows.cu_seqlens if cp_context is None else cp_context.cu_seqlens,
            cu_seqlens_cpu=rows.cu_seqlens_cpu,
            cp_context=cp_context,
            disable_recompute=not self.recompute,
        )
        return o, recurrent_state, conv_state

    def project(self, x: torch.Tensor, values: Values | None = None) -> tuple[Any, ...]:
        """From the convolution's output `[B, T, d]` to the operator's q, k, v, beta (before its sigmoid) and g."""
        b, k, *q = self.x_proj(x).split(self.x_sizes, dim=-1)
        # PyTorch adds the bias in the product if its input has two dimensions; an adapter may look at the rows
        bare = is_bare(self.beta_proj, b.device)
        b = b.flatten(0, 1) if bare else b
        beta = self.beta_proj(b)
        if values is not None and bare:
            values.add(beta, F.linear, b, self.beta_proj.weight, self.beta_proj.bias)
        beta = beta.view(k.shape[0], k.shape[1], -1)
        v = x if self.v_proj is None else self.v_proj(x)
        return (
            self.by_heads(q[0] if q else k),
            self.k_norm(self.by_heads(k)),
            self.by_heads(v),
            beta if self.scalar_beta else self.by_heads(beta),
            None if self.gate is None else self.gate(x),
        )

    def inputs(self, x: torch.Tensor, rows: Rows, values: Values | None = None) -> dict[str, Any]:
        """The operator's arguments that depend on the layer's options, with keys and decays of padding set to zero."""
        q, k, v, beta, g = self.project(x, values)
        return dict(
            q=q, k=rows.silence(k), v=v, beta=beta, g=None if g is None else rows.silence(g), exact=self.exact,
            use_beta_sigmoid_in_kernel=True, allow_neg_eigval=self.allow_neg_eigval,
        )

    def parts(self) -> list[nn.Module]:
        """The modules that a token passes."""
        gate = [] if self.gate is None else [self.gate, self.gate.down, self.gate.up]
        value_proj = [] if self.v_proj is None else [self.v_proj]
        return [self.in_proj, self.conv1d, self.x_proj, self.beta_proj, self.k_norm, *value_proj, *gate, self.out_proj]

    def by_heads(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, H D]` as `[B, T, H, D]`."""
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1)

    def op_for(self, T: int) -> Callable:
        # an exported program has the same op for all lengths
        long = is_exporting() or T > MAX_RECURRENT_LENGTH
        return OPS[self.mode if long else 'fused_recurrent']
