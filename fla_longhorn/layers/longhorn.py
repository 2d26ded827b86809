"""The Longhorn layer: the authors' block, which is Mamba's with the selective scan replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from fla_longhorn.layers.call import LayerCall, begin
from fla_longhorn.layers.gate import Gate
from fla_longhorn.layers.options import check_options, rank_of
from fla_longhorn.layers.weight_decay import NoWeightDecay
from fla_longhorn.modules import L2Norm, ShortConvolution
from fla_longhorn.modules.bare import is_bare
from fla_longhorn.modules.context_parallel import convolve_part
from fla_longhorn.modules.direct import get_child, get_parameter
from fla_longhorn.modules.recompute import Recompute, can_recompute
from fla_longhorn.modules.rows import Rows
from fla_longhorn.modules.states import can_update_in_place
from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update
from fla_longhorn.ops.mixer import mix_layer
from fla_longhorn.ops.operator import MAX_RECURRENT_LENGTH

if TYPE_CHECKING:
    from fla.models.utils import Cache

NOTHING: nullcontext[None] = nullcontext()
OPS = {'chunk': chunk_longhorn, 'fused_recurrent': fused_recurrent_longhorn}


def recurrence_in_one_kernel(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fused_recurrent_longhorn` by the kernel for sequences, which saves states: for a single token there is another one."""
    needs_gradient = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs.values())
    states = inputs['q'].shape[1] == 1 and not needs_gradient
    o, final_state, *_ = fused_recurrent_longhorn(**inputs, return_intermediate_states=states)
    return o, final_state


def linear_of_rows(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """`linear(x)` for a strided `x` `[B, T, D]`."""
    # PyTorch adds the bias in the product if x has two dimensions; a strided x of three costs another kernel
    y = F.linear(x.flatten(0, 1), linear.weight, linear.bias)
    return y.view(x.shape[0], x.shape[1], -1)


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
            token and channel in 16-bit training. Under `torch.compile` the compiler chooses. Default: `True`.
        norm_eps (float, Optional):
            Unused, accepted because fla's layers have it. Default: 1e-5.
        layer_idx (int, Optional):
            Index of the layer, needed with a cache. Default: `None`.
        allow_neg_eigval (bool, Optional):
            Whether step sizes are twice as large, so that a token with `beta |k|^2 > 1` turns what its key reads instead of
            only fading it. It does nothing but write more with `k_norm='l2'`, which warns. Default: `False`.
        gate (str, Optional):
            Whether the memory decays before each step, by one :class:`fla_longhorn.layers.gate.Gate` for each `'head'` or each
            `'channel'`. Default: `None`, as in the paper.

    The defaults are the paper's.
    """

    no_weight_decay = ('D',)
    # keywords of `forward` that a host model passes to all its mixers
    ignored_keywords: tuple[str, ...] = ()
    # whether a token has the same bits alone and in a sequence (`fla_longhorn_extras.batch_invariant`)
    batch_invariant = False

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
                Mask of zeros and ones, of shape `[B, >= T]` (the last T columns are used) and any dtype. Padding, marked 0,
                does not change the state and gets output 0. Default: `None`.
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
        call = begin(self, hidden_states, attention_mask, past_key_values, bool(use_cache), rows, kwargs)
        x, z = call.project(get_child(self, 'in_proj'), hidden_states)
        recurrent_state, conv_state = call.recurrent_state, call.conv_state
        o = mix_layer(self, x, z, conv_state, recurrent_state) if call.is_step else None
        if o is None:
            o, recurrent_state, conv_state = self.mix(x, z, call)
        call.store(recurrent_state, conv_state)
        o = get_child(self, 'out_proj')(o.view(o.shape[0], o.shape[1], -1))
        return call.rows.leave(o), None, past_key_values

    def mix(
        self, x: torch.Tensor, z: torch.Tensor, call: LayerCall,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """From the first projection's halves to the last one's input, the recurrent state and the convolution's."""
        # a single token changes the convolution's state, so it cannot be computed again
        with Recompute() if self.recompute and call.T > 1 and can_recompute() else NOTHING as recompute:
            x, conv_state = self.convolve(x, call, recompute)
            inputs = self.mix_inputs(x, call, recompute)
            inputs.update(
                D=call.own_channels(get_parameter(self, 'D')), z=call.by_heads(z), cu_seqlens_cpu=call.cu_seqlens_cpu,
            )
            op, kept = self.op_for(call.T), call.recurrent_state
            # a CUDA graph needs the state at the same address
            if not (call.T == 1 and call.use_cache and can_update_in_place(kept)):
                kept = None
            if kept is not None and op is fused_recurrent_longhorn:
                return longhorn_state_update(kept, **inputs), kept, conv_state
            o, recurrent_state = op(
                **inputs, initial_state=call.recurrent_state, output_final_state=call.use_cache, cp_context=call.cp_context,
            )
            if kept is not None and recurrent_state is not None:
                recurrent_state = kept.copy_(recurrent_state)
        return o, recurrent_state, conv_state

    def convolve(
        self, x: torch.Tensor, call: LayerCall, recompute: Recompute | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The convolution of `x` `[B, T, d]`, and its new state."""
        if call.cp_context is not None:
            return convolve_part(self.conv1d, x, call.cp_context, recompute), None
        conv1d, options = get_child(self, 'conv1d'), call.rows.of_convolution
        y, conv_state = conv1d(x=x, cache=call.conv_state, output_final_state=call.use_cache, **options)
        if recompute is not None:
            recompute.add(
                conv1d, y, lambda conv, x, state: conv.forward(x=x, cache=state, **options)[0], x, call.conv_state,
            )
        return y, conv_state

    def mix_inputs(self, x: torch.Tensor, call: LayerCall, recompute: Recompute | None = None) -> dict[str, Any]:
        """From the convolution's output `x` `[B, T, d]` to the op's arguments."""
        b, k, q = self.split(get_child(self, 'x_proj')(x))
        beta_proj = get_child(self, 'beta_proj')
        strided = not (torch.compiler.is_compiling() or b.is_contiguous()) and is_bare(beta_proj, b.device)
        beta = linear_of_rows(beta_proj, b) if strided else beta_proj(b)
        if recompute is not None:
            recompute.add(beta_proj, beta, linear_of_rows, b)
        k, g = call.rows.silence(k), {}
        if self.gate is not None:
            g['g'] = self.gate(x, call.part)
            g['g'] = call.rows.silence(g['g'].flatten(2)).view_as(g['g'])
        v = x if self.v_proj is None else self.v_proj(call.all_channels(x))
        return dict(
            q=call.of_heads(self.by_heads(q)), k=get_child(self, 'k_norm')(call.of_heads(self.by_heads(k))),
            v=call.by_heads(v), beta=call.of_heads(beta) if self.scalar_beta else call.by_heads(beta),
            exact=self.exact, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=self.allow_neg_eigval,
            cu_seqlens=call.rows.cu_seqlens if call.cp_context is None else call.cp_context.cu_seqlens, **g,
        )

    def by_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or queries of all heads `[B, T, H K]` as `[B, T, H, K]`."""
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1)

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From `x_proj`'s output to step sizes before `beta_proj`, keys and queries, of all heads."""
        beta, k, *rest = projected.split_with_sizes(self.x_sizes, -1)
        return beta, k, rest[0] if rest else k

    def op_for(self, q_len: int) -> Callable:
        if self.batch_invariant:
            return recurrence_in_one_kernel
        # an exported program has the same op for all lengths
        long = is_exporting() or q_len > MAX_RECURRENT_LENGTH
        return OPS[self.mode if long else 'fused_recurrent']
