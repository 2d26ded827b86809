""":meth:`fla_longhorn.layers.Longhorn.step` in one loop, if no hook, adapter or override is attached to the layer's parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fla_longhorn.layers import Longhorn
from fla_longhorn.layers.gate import Gate
from fla_longhorn.modules import L2Norm, ShortConvolution
from fla_longhorn.modules.dispatch import is_bare
from fla_longhorn.ops.mixer import Mixer, mix_tokens
from fla_longhorn.ops.plain import is_plain
from fla_longhorn.ops.pool import Pool

CPU = torch.device('cpu')
PROJECT = Longhorn.project


def mix_token(layer: Longhorn, x: Tensor, z: Tensor, recurrent_state: Tensor, conv_state: Tensor) -> Tensor | None:
    """None, with nothing changed, if there is no loop for the call, or if the layer's parts are not as its constructor made
    them: a subclass's method, an adapter, a hook, a bias, weights that are elsewhere.
    """
    gate, conv, k_norm = layer.gate, layer.conv1d, layer.k_norm
    if not x.is_cpu or conv_state.requires_grad or layer.v_proj is not None:
        return None
    if type(layer).project is not PROJECT or 'project' in layer.__dict__:
        return None
    products = (layer.x_proj, layer.beta_proj) if gate is None else (layer.x_proj, layer.beta_proj, gate.down, gate.up)
    for part, cls in ((conv, ShortConvolution), (gate, Gate), *((product, nn.Linear) for product in products)):
        if part is not None and not (type(part) is cls and is_bare(part, CPU)):
            return None
        if cls is nn.Linear and (part.bias is None) is (part is layer.beta_proj):
            return None
    if not is_bare(k_norm, CPU) or conv.activation is None or type(k_norm) not in (L2Norm, nn.Identity):
        return None
    if getattr(k_norm, 'output_dtype', None) is not None:
        return None
    mixer = Mixer(
        conv.weight, conv.bias, layer.x_proj.weight, layer.beta_proj.weight, layer.beta_proj.bias, layer.D, layer.num_heads,
        layer.state_size, layer.exact, layer.allow_neg_eigval, getattr(k_norm, 'eps', None),
        None if gate is None else (gate.down.weight, gate.up.weight, gate.A_log, gate.dt_bias),
    )
    if not is_plain(x, z, conv_state, recurrent_state, *mixer.parameters):
        return None
    return mix_tokens(x, z, mixer, conv_state, Pool(recurrent_state))
