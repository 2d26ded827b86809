from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from fla.layers.utils import get_layer_cache, repad_hidden_states, unpad_hidden_states, update_layer_cache
from fla.modules import ShortConvolution
from fla.ops.longhorn import chunk_longhorn, fused_recurrent_longhorn

if TYPE_CHECKING:
    from fla.models.cache_utils import Cache
    from transformers.processing_utils import Unpack


class LonghornGate(nn.Module):
    r"""
    Log decays of each head; or one per channel.
    They are :math:`g = -\exp(A_{log}) \mathrm{softplus}(W_{up} W_{down} x + dt_{bias})`, and fresh ones
    have half-lives of 7 to 700 tokens.
    """

    def __init__(self, input_size: int, rank: int, num_gates: int) -> None:
        super().__init__()
        self.down = nn.Linear(input_size, rank, bias=False)
        self.up = nn.Linear(rank, num_gates, bias=False)
        self.A_log = nn.Parameter(torch.zeros(num_gates))
        self.dt_bias = nn.Parameter(torch.empty(num_gates))
        self.A_log._no_weight_decay = True
        self.dt_bias._no_weight_decay = True
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.A_log)
        shares = (torch.arange(len(self.dt_bias), dtype=torch.float32, device=self.dt_bias.device) + 0.5) / len(self.dt_bias)
        rates = math.log(2) / 700 * 100 ** shares
        # softplus of the bias is the rate
        self.dt_bias.copy_(rates + torch.log(-torch.expm1(-rates)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.A_log.float().exp() * F.softplus(self.up(self.down(x)).float() + self.dt_bias.float())


class Longhorn(nn.Module):
    r"""
    The layer implementation for [Longhorn: State Space Models are Amortized Online Learners](https://arxiv.org/abs/2407.14207).

    Args:
        mode (str, Optional):
            Which Longhorn kernel to use for more than 64 tokens: `chunk` or `fused_recurrent`. Default: `chunk`.
        hidden_size (int, Optional):
            The hidden size of the input. Default: 768.
        state_size (int, Optional):
            Entries of the state per channel, at most 256. Default: 16.
        expand (float, Optional):
            The channels as a multiple of the hidden size. Default: 2.
        num_heads (int, Optional):
            The number of heads, each with its own queries and keys. Default: 1.
        conv_size (int, Optional):
            The kernel size of the short convolution. Default: 4.
        conv_bias (bool, Optional):
            Whether to use bias in the short convolution. Default: `True`.
        beta_rank (int or str, Optional):
            The rank of the projection to the step sizes; `auto` is `ceil(hidden_size / 16)`. Default: `auto`.
        use_bias (bool, Optional):
            Whether `in_proj` and `out_proj` have a bias. Default: `False`.
        exact (bool, Optional):
            Whether the update is exact, instead of its diagonal approximation. Default: `True`.
        allow_neg_eigval (bool, Optional):
            Whether step sizes are doubled, which allows negative eigenvalues. Default: `False`.
        gate (str, Optional):
            `head` for a state that decays, by a gate of each head; `channel` for one per channel.
            Default: `None`, as in the paper.
        layer_idx (int, Optional):
            The index of the layer. Default: None.
    """

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
        exact: bool = True,
        allow_neg_eigval: bool = False,
        gate: str | None = None,
        layer_idx: int = None,
    ) -> Longhorn:
        super().__init__()

        self.mode = mode
        self.hidden_size = hidden_size
        self.state_size = state_size
        self.expand = expand
        self.num_heads = num_heads
        self.conv_size = conv_size
        self.exact = exact
        self.allow_neg_eigval = allow_neg_eigval
        self.per_channel = gate == 'channel'
        self.layer_idx = layer_idx
        self.intermediate_size = round(hidden_size * expand)
        self.beta_rank = math.ceil(hidden_size / 16) if beta_rank == 'auto' else beta_rank

        assert mode in ['chunk', 'fused_recurrent'], f"Not supported mode `{mode}`."
        assert gate in [None, 'head', 'channel'], f"Not supported gate `{gate}`."
        assert self.intermediate_size % num_heads == 0, f"channels must be divisible by num_heads of {num_heads}"

        self.in_proj = nn.Linear(hidden_size, 2 * self.intermediate_size, bias=use_bias)
        self.conv1d = ShortConvolution(
            hidden_size=self.intermediate_size,
            kernel_size=conv_size,
            bias=conv_bias,
            activation='silu',
        )
        self.x_proj = nn.Linear(self.intermediate_size, self.beta_rank + 2 * num_heads * state_size, bias=False)
        self.beta_proj = nn.Linear(self.beta_rank, self.intermediate_size, bias=True)
        self.gate = LonghornGate(
            input_size=self.intermediate_size,
            rank=self.beta_rank,
            num_gates=self.intermediate_size if gate == 'channel' else num_heads,
        ) if gate is not None else None
        self.D = nn.Parameter(torch.ones(self.intermediate_size))
        self.D._no_weight_decay = True
        self.out_proj = nn.Linear(self.intermediate_size, hidden_size, bias=use_bias)
        nn.init.zeros_(self.beta_proj.bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Unpack[dict],
    ) -> tuple[torch.Tensor, torch.Tensor | None, Cache | None]:
        if attention_mask is not None:
            assert len(attention_mask.shape) == 2, (
                "Expected attention_mask as a 0-1 matrix with shape [batch_size, seq_len] "
                "for padding purposes (0 indicating padding). "
                "Arbitrary attention masks of shape [batch_size, seq_len, seq_len] are not allowed."
            )

        batch_size, q_len, _ = hidden_states.shape
        mode = 'fused_recurrent' if q_len <= 64 else self.mode

        last_state = get_layer_cache(self, past_key_values)
        recurrent_state, conv_state = None, None
        if last_state is not None:
            recurrent_state, conv_state = last_state['recurrent_state'], last_state['conv_state']

        cu_seqlens = kwargs.get('cu_seqlens')
        hidden_states, indices, cu_seqlens = unpad_hidden_states(hidden_states, cu_seqlens, attention_mask, q_len)

        x, z = self.in_proj(hidden_states).chunk(2, dim=-1)
        v, conv_state = self.conv1d(
            x=x,
            cache=conv_state,
            output_final_state=use_cache,
            cu_seqlens=cu_seqlens,
        )
        b, k, q = self.x_proj(v).split([self.beta_rank, *[self.num_heads * self.state_size] * 2], dim=-1)
        beta = self.beta_proj(b)
        g = self.gate(v) if self.gate is not None else None
        if self.per_channel:
            g = rearrange(g, '... (h d) -> ... h d', h=self.num_heads)

        q, k, v, beta, z = (rearrange(x, '... (h d) -> ... h d', h=self.num_heads) for x in (q, k, v, beta, z))
        op = chunk_longhorn if mode == 'chunk' else fused_recurrent_longhorn
        o, recurrent_state = op(
            q=q,
            k=k,
            v=v,
            beta=beta,
            initial_state=recurrent_state,
            output_final_state=use_cache,
            exact=self.exact,
            D=rearrange(self.D, '(h d) -> h d', h=self.num_heads),
            z=z,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=cu_seqlens,
            allow_neg_eigval=self.allow_neg_eigval,
            g=g,
        )

        update_layer_cache(
            self,
            past_key_values,
            recurrent_state=recurrent_state,
            conv_state=conv_state,
            offset=q_len,
        )

        o = self.out_proj(rearrange(o, '... h d -> ... (h d)'))
        o = repad_hidden_states(o, indices, batch_size, q_len)
        return o, None, past_key_values
