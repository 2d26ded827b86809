"""The authors' checkpoints in our names."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

# the authors' names -> ours, in the order they are tried; `\g<i>` is the layer
RENAMES = (
    (r'backbone\.embedding\.weight', r'model.embeddings.weight'),
    (r'backbone\.layers\.(?P<i>\d+)\.mixer\.dt_head\.(?P<p>weight|bias)', r'model.layers.\g<i>.attn.beta_proj.\g<p>'),
    (
        r'backbone\.layers\.(?P<i>\d+)\.mixer\.'
        r'(?P<p>D|(?:in_proj|out_proj|conv1d)\.(?:weight|bias)|x_proj\.weight)',
        r'model.layers.\g<i>.attn.\g<p>',
    ),
    (r'backbone\.layers\.(?P<i>\d+)\.norm\.weight', r'model.layers.\g<i>.attn_norm.weight'),
    (r'backbone\.norm_f\.weight', r'model.norm.weight'),
    (r'lm_head\.weight', r'lm_head.weight'),
)
# what `torch.compile`, DDP and the authors' `LonghornLM` put before a name
WRAPPERS = r'^(?:(?:_orig_mod|module|transformer)\.)*'


def convert_official_state_dict(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename a state dict of the authors' code (github.com/Cranial-XIX/longhorn) for :class:`LonghornForCausalLM`.

    Args:
        state_dict (Mapping[str, torch.Tensor]):
            Their tensors, with or without a `transformer.` prefix (and DDP's or `torch.compile`'s). Nothing is copied.

    Returns:
        dict[str, torch.Tensor]:
            The same tensors by our names; shapes agree, so that `load_state_dict(..., strict=True)` takes them.

    Raises:
        ValueError: a name isn't one of the authors', or two of them mean the same.
    """
    converted = {}
    for name, tensor in state_dict.items():
        ours = _rename(re.sub(WRAPPERS, '', name))
        if ours is None:
            raise ValueError(f"state_dict holds {name!r}, which is no parameter of the authors' Longhorn")
        if ours in converted:
            raise ValueError(f'state_dict holds {ours!r} twice, the second time as {name!r}')
        converted[ours] = tensor
    return converted


def _rename(name: str) -> str | None:
    for theirs, ours in RENAMES:
        if match := re.fullmatch(theirs, name):
            return match.expand(ours)
    return None
