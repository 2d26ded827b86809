"""The sizes of Vision Longhorn, registered with timm."""

from __future__ import annotations

from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import resample_abs_pos_embed
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from fla_longhorn_extras.timm.model import VisionLonghorn


def resize_positions(state_dict: dict[str, torch.Tensor], model: VisionLonghorn) -> dict[str, torch.Tensor]:
    """Resample the position embedding of a checkpoint of another image size to the model's grid."""
    positions = state_dict.get('pos_embed')
    if positions is not None and positions.shape != model.pos_embed.shape:
        state_dict = dict(state_dict, pos_embed=resample_abs_pos_embed(
            positions, new_size=list(model.patch_embed.grid_size), num_prefix_tokens=model.num_prefix_tokens,
        ))
    return state_dict


default_cfgs = generate_default_cfgs({
    f'vision_longhorn_{size}_patch16_224': dict(
        url='', num_classes=1000, input_size=(3, 224, 224), pool_size=None, crop_pct=0.875, interpolation='bicubic',
        fixed_input_size=True, mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD, first_conv='patch_embed.proj',
        classifier='head', license='mit',
    )
    for size in ('tiny', 'small', 'base')
})


def create(variant: str, pretrained: bool, **kwargs: Any) -> VisionLonghorn:
    return build_model_with_cfg(
        VisionLonghorn, variant, pretrained, pretrained_filter_fn=resize_positions,
        feature_cfg=dict(out_indices=kwargs.pop('out_indices', 3), feature_cls='getter'), **kwargs,
    )


@register_model
def vision_longhorn_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """6.85M parameters, beside Vision Mamba's tiny of 7.15M."""
    return create('vision_longhorn_tiny_patch16_224', pretrained, **dict(dict(embed_dim=192), **kwargs))


@register_model
def vision_longhorn_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    """25.2M parameters, beside Vision Mamba's small of 25.8M."""
    return create('vision_longhorn_small_patch16_224', pretrained, **dict(dict(embed_dim=384), **kwargs))


@register_model
def vision_longhorn_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionLonghorn:
    return create('vision_longhorn_base_patch16_224', pretrained, **dict(dict(embed_dim=768), **kwargs))
