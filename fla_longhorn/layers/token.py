"""One plain token of each row, as decoding calls the layer: the steps of `Longhorn.forward`, and no others.

Nothing of packed sequences, padding, recording and several ranks is in it; the results are those of `forward`, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from fla.layers.utils import update_layer_cache

from fla_longhorn.modules.boundaries import WITHOUT_EFFECT
from fla_longhorn.modules.cache import can_update_in_place, read_states
from fla_longhorn.modules.direct import get_parameter
from fla_longhorn.modules.linear import project
from fla_longhorn.modules.padding import ends_in_tokens
from fla_longhorn.modules.rewind import is_recording
from fla_longhorn.ops import fused_recurrent_longhorn, longhorn_state_update
from fla_longhorn.ops.arguments import Arguments, get_tensors
from fla_longhorn.ops.operator import step_states
from fla_longhorn.ops.plain import are_ordinary, is_plain

if TYPE_CHECKING:
    from fla.models.utils import Cache

    from fla_longhorn.layers.longhorn import Longhorn


def is_plain_token(
    layer: Longhorn,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    use_cache: bool | None,
    kwargs: dict[str, Any],
) -> bool:
    """Whether :func:`mix_token` serves a call of the layer, whose mask is checked."""
    if hidden_states.shape[1] != 1 or not is_plain(hidden_states, attention_mask):
        return False
    for name, value in kwargs.items():
        if value is not None and name not in WITHOUT_EFFECT and name not in layer.ignored_keywords:
            return False
    if use_cache and is_recording(layer, cache):
        return False
    return attention_mask is None or ends_in_tokens(attention_mask)


def mix_token(
    layer: Longhorn, hidden_states: torch.Tensor, cache: Cache | None, use_cache: bool | None,
) -> torch.Tensor:
    """The outputs `[B, 1, hidden_size]` of `hidden_states`; with `use_cache` the states move on."""
    B, H, K = hidden_states.shape[0], layer.num_heads, layer.state_size
    modules: dict[str, Any] = layer._modules
    state, conv_state = read_states(layer, cache, B)
    x, z = project(modules['in_proj'], hidden_states.squeeze(1)).chunk(2, -1)
    x, conv_state = modules['conv1d'](x.unsqueeze(1), cache=conv_state, output_final_state=bool(use_cache))
    x = x.squeeze(1)
    beta, k, q = layer.split(project(modules['x_proj'], x))
    beta = project(modules['beta_proj'], beta, as_tokens=False)
    v = x if layer.v_proj is None else project(layer.v_proj, x)
    inputs: dict[str, Any] = dict(
        q=q.view(B, 1, H, K), k=modules['k_norm'](k.view(B, 1, H, K)), v=v.view(B, 1, H, -1),
        beta=beta.view(B, 1, H) if layer.scalar_beta else beta.view(B, 1, H, -1),
        D=get_parameter(layer, 'D').view(H, -1), z=z.view(B, 1, H, -1), exact=layer.exact, use_beta_sigmoid_in_kernel=True,
    )
    if use_cache and can_update_in_place(state):
        args = Arguments(initial_state=state, output_final_state=True, **inputs)
        # what the public function does with inputs that it has checked; these fit by the views above
        if state.device == x.device and are_ordinary(*get_tensors(args)):
            o = step_states(args)
        else:
            o = longhorn_state_update(state, **inputs)
    else:
        o, state = fused_recurrent_longhorn(initial_state=state, output_final_state=bool(use_cache), **inputs)
    if use_cache:
        update_layer_cache(layer, cache, recurrent_state=state, conv_state=conv_state, offset=1)
    return project(modules['out_proj'], o.view(B, -1)).unsqueeze(1)
