"""The states of a layer in fla's cache, checked."""

from __future__ import annotations

from typing import Any

import torch

from fla_longhorn.ops.inputs import LOW_PRECISIONS


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
