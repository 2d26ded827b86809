"""A layer's decoding step between its first and its last projection as one loop, where nobody watches or changes its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fla_longhorn.layers.call import LayerCall
from fla_longhorn.layers.gate import Gate
from fla_longhorn.modules.bare import is_bare, is_unchanged
from fla_longhorn.modules.direct import get_child, get_parameter
from fla_longhorn.modules.rows import Rows
from fla_longhorn.modules.states import can_update_in_place
from fla_longhorn.ops.mixer import Mixer, mix_tokens
from fla_longhorn.ops.plain import is_plain
from fla_longhorn.ops.pool import Pool

if TYPE_CHECKING:
    from fla_longhorn.layers.longhorn import Longhorn

# the loop is for it alone
CPU = torch.device('cpu')
# what the loop replaces
MODULES = ('conv1d', 'x_proj', 'beta_proj', 'k_norm')
GATE_FORWARD = Gate.forward
METHODS = ('mix', 'convolve', 'mix_inputs', 'by_heads', 'split', 'op_for')


def mix_token(layer: Longhorn, base: type[Longhorn], x: torch.Tensor, z: torch.Tensor, call: LayerCall) -> torch.Tensor | None:
    """The input `[B, 1, d]` of the last projection, given the first one's halves; the states are updated in place.

    None, with nothing changed, if the call is another one, if no backend has such a loop, or if a part of the layer is not
    what `base` made: a method of a subclass, an adapter, a hook, weights that are elsewhere.
    """
    if torch.compiler.is_compiling() or call.T != 1 or not call.use_cache or type(call.rows) is not Rows:
        return None
    recurrent_state, conv_state = call.recurrent_state, call.conv_state
    if not x.is_cpu or not can_update_in_place(recurrent_state) or conv_state is None or conv_state.requires_grad:
        return None
    if call.part is not None or call.cp_context is not None or not is_own(layer, base):
        return None
    conv, x_proj, beta_proj, k_norm = [get_child(layer, name) for name in MODULES]
    mixer = Mixer(
        get_parameter(conv, 'weight'), get_parameter(conv, 'bias'), get_parameter(x_proj, 'weight'),
        get_parameter(beta_proj, 'weight'), get_parameter(beta_proj, 'bias'), get_parameter(layer, 'D'),
        layer.num_heads, layer.state_size, layer.exact, layer.allow_neg_eigval, getattr(k_norm, 'eps', None),
        None if layer.gate is None else parameters_of(layer.gate),
    )
    if not is_plain(x, z, conv_state, recurrent_state, *mixer.parameters):
        return None
    return mix_tokens(x, z, mixer, conv_state, Pool(recurrent_state))


def is_own(layer: Longhorn, base: type[Longhorn]) -> bool:
    """Whether the layer has the parts that the loop knows, on the CPU, as `base` made them."""
    gate = layer.gate
    if layer.v_proj is not None or (gate is not None and not (type(gate) is Gate and is_unchanged(gate, GATE_FORWARD))):
        return False
    if gate is not None and not (is_bare(gate.down, CPU) and is_bare(gate.up, CPU)):
        return False
    # generators are slower
    for name in MODULES:
        if not is_bare(get_child(layer, name), CPU):
            return False
    for name in METHODS:
        if getattr(getattr(layer, name), '__func__', None) is not getattr(base, name):
            return False
    return get_child(layer, 'conv1d').activation in ('silu', 'swish')


def parameters_of(gate: Gate) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        get_parameter(gate.down, 'weight'), get_parameter(gate.up, 'weight'), get_parameter(gate, 'A_log'),
        get_parameter(gate, 'dt_bias'),
    )
