"""Vision Longhorn (arXiv 2407.14207, section 5.5 and Table 3) as a model of timm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from timm.layers import (
    PatchEmbed,
    calculate_drop_path_rates,
    global_pool_nlc,
    lecun_normal_,
    resample_abs_pos_embed,
    trunc_normal_,
)
from timm.models import checkpoint
from timm.models._features import feature_take_indices

from fla_longhorn.layers.weight_decay import no_weight_decay
from fla_longhorn_extras.timm.mixer import Block
from fla_longhorn_extras.timm.packing import Packing
from fla_longhorn_extras.timm.tracing import RMSNorm

POOLS = ('', 'token', 'avg', 'max', 'avgmax')


class VisionLonghorn(nn.Module):
    """Vision Mamba's architecture (arXiv 2401.09417) with Longhorn's update in both directions.

    The blocks run with the class token in the middle of the patches. Everywhere else it comes first, as timm's functions
    expect: in `pos_embed`, in what `forward_features` returns, and in the prefix tokens of `forward_intermediates`.

    Args:
        img_size, patch_size (int or tuple, Optional):
            Height and width of the images and of a patch. Default: 224, 16.
        in_chans, num_classes (int, Optional):
            Channels of the images, and classes; 0 leaves out the classifier. Default: 3, 1000.
        global_pool (str, Optional):
            Input of the classifier: `'token'` (the class token), `'avg'`, `'max'`, `'avgmax'` (of the patches) or `''`
            (all tokens). Default: `'token'`.
        embed_dim, depth (int, Optional):
            Width and number of the blocks. Default: 192, 24.
        class_token (bool, Optional):
            Whether there is a class token. Default: `True`.
        dynamic_img_size (bool, Optional):
            Whether to accept sizes other than `img_size`, and resample the position embedding. Default: `False`.
        dynamic_img_pad (bool, Optional):
            Whether to pad sizes that `patch_size` does not divide. Default: `False`.
        drop_rate, pos_drop_rate, drop_path_rate (float, Optional):
            Dropout before the classifier and after the position embedding, and stochastic depth. Default: 0.
        state_size, expand, conv_size, beta_rank, exact, scalar_beta, allow_neg_eigval, gate, bidirectional (Optional):
            Options of each block's :class:`BidirectionalLonghorn`.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'token',
        embed_dim: int = 192,
        depth: int = 24,
        class_token: bool = True,
        dynamic_img_size: bool = False,
        dynamic_img_pad: bool = False,
        drop_rate: float = 0.,
        pos_drop_rate: float = 0.,
        drop_path_rate: float = 0.,
        device=None,
        dtype=None,
        **mixer: Any,
    ) -> None:
        super().__init__()
        check_pool(global_pool, class_token)
        dd = {'device': device, 'dtype': dtype}
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1 if class_token else 0
        self.grad_checkpointing = False

        self.patch_embed = PatchEmbed(
            img_size=img_size, patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim,
            strict_img_size=not dynamic_img_size, dynamic_img_pad=dynamic_img_pad, output_fmt='NHWC', **dd,
        )
        num_tokens = self.patch_embed.num_patches + self.num_prefix_tokens
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd)) if class_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, num_tokens, embed_dim, **dd))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.blocks = nn.ModuleList(
            Block(embed_dim, rate, **dd, **mixer) for rate in calculate_drop_path_rates(drop_path_rate, depth)
        )
        self.feature_info = [
            dict(module=f'blocks.{i}', num_chs=embed_dim, reduction=self.patch_embed.feat_ratio()) for i in range(depth)
        ]
        self.norm: nn.Module = RMSNorm(embed_dim, eps=1e-5, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.init_weights(needs_reset=False)

    @torch.no_grad()
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise as Vision Mamba does; `needs_reset`, as after `to_empty`, first calls each `reset_parameters`."""
        for module in self.modules() if needs_reset else ():
            if callable(reset := getattr(module, 'reset_parameters', None)):
                reset()
        lecun_normal_(self.patch_embed.proj.weight)
        nn.init.zeros_(self.patch_embed.proj.bias)
        for parameter in (self.pos_embed, self.cls_token):
            if parameter is not None:
                trunc_normal_(parameter, std=0.02)
        for block in self.blocks:
            # the residual is a sum over the blocks
            weight = block.get_parameter('mixer.out_proj.weight')
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            weight.div_(math.sqrt(len(self.blocks)))
        self.init_head()

    @torch.no_grad()
    def init_head(self) -> None:
        if isinstance(self.head, nn.Linear):
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        return no_weight_decay(self) | {'pos_embed', 'cls_token'}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(stem=r'^cls_token|pos_embed|patch_embed', blocks=[(r'^blocks\.(\d+)', None), (r'^norm', (99999,))])

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; the arguments are the constructor's."""
        if global_pool is not None:
            check_pool(global_pool, self.cls_token is not None)
            self.global_pool = global_pool
        self.num_classes = num_classes
        dd: dict[str, Any] = {'device': self.pos_embed.device, 'dtype': self.pos_embed.dtype}
        self.head = nn.Linear(self.embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.init_head()

    def set_input_size(self, img_size: tuple[int, int] | None = None, patch_size: tuple[int, int] | None = None) -> None:
        """Change the size of the images or patches; the weights of the patches and positions are resampled."""
        before = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        if self.patch_embed.grid_size != before:
            self.pos_embed = nn.Parameter(self.positions(self.patch_embed.grid_size, before))
        for info in self.feature_info:
            info['reduction'] = self.patch_embed.feat_ratio()

    def positions(self, grid: tuple[int, int], before: tuple[int, int] | None = None) -> torch.Tensor:
        """The position embedding `[1, N, D]` of a grid of patches."""
        return resample_abs_pos_embed(
            self.pos_embed, new_size=list(grid), old_size=list(before or self.patch_embed.grid_size),
            num_prefix_tokens=self.num_prefix_tokens,
        )

    def place_tokens(self, x: torch.Tensor, any_size: bool) -> torch.Tensor:
        """Patches `[B, h, w, D]` to tokens `[B, N, D]` in float32, the class token in the middle."""
        B, h, w, _ = x.shape
        x, positions = x.flatten(1, 2), self.positions((h, w)) if any_size else self.pos_embed
        if self.cls_token is None:
            return self.pos_drop(x + positions).float()
        x = torch.cat([self.cls_token.expand(B, -1, -1).to(x.dtype), x], 1)
        x = self.pos_drop(x + positions).float()
        # the first half is the smaller one of an odd number of patches
        middle = 1 + (x.shape[1] - 1) // 2
        return torch.cat([x[:, 1:middle], x[:, :1], x[:, middle:]], 1)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.place_tokens(self.patch_embed(x), any_size=not self.patch_embed.strict_img_size)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """The blocks' output to features: the class token first, in the dtype of the parameters."""
        if self.cls_token is not None:
            middle = (x.shape[1] - 1) // 2
            x = torch.cat([x[:, middle:middle + 1], x[:, :middle], x[:, middle + 1:]], 1)
        return x.to(self.pos_embed.dtype)

    def run_block(self, block: nn.Module, x: torch.Tensor, packing: Packing | None = None) -> torch.Tensor:
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint(block, x, packing)
        return block(x, packing)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Images `[B, C, H, W]` to tokens `[B, N, D]`, the class token first."""
        x = self.embed(x)
        for block in self.blocks:
            x = self.run_block(block, x)
        return self.finish(self.norm(x))

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        return global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = self.head_drop(self.pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_packed(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits of images of different sizes, their tokens packed into one row without padding.

        Args:
            images (Sequence[torch.Tensor]):
                N images of shape `[C, H, W]`, with H and W multiples of `patch_size`; else raises `ValueError`.

        Returns:
            Logits `[N, num_classes]`; with `global_pool=''` those of all tokens, `[T, num_classes]`.
        """
        tokens = [self.place_tokens(x, any_size=True) for x in self.embed_each(images)]
        packing = Packing.of([x.shape[1] for x in tokens], tokens[0].device)
        x = torch.cat(tokens, 1)
        for block in self.blocks:
            x = self.run_block(block, x, packing)
        rows = self.norm(x).split([y.shape[1] for y in tokens], 1)
        pooled = torch.cat([self.pool(self.finish(row)).flatten(0, -2) for row in rows])
        return self.head(self.head_drop(pooled))

    def embed_each(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Patches `[1, h, w, D]` of each image, from one product for all of them."""
        p, q = self.patch_embed.patch_size
        if len(images) == 0:
            raise ValueError('images must have at least one image, got none')
        for i, image in enumerate(images):
            shape = tuple(image.shape)
            if len(shape) != 3 or shape[0] != self.in_chans or shape[1] % p or shape[2] % q or 0 in shape:
                raise ValueError(
                    f'images[{i}] must be [{self.in_chans}, H, W] with H a multiple of {p} and W of {q}, got {list(shape)}'
                )
        patches = [rearrange(x, 'c (h p) (w q) -> (h w) (c p q)', p=p, q=q) for x in images]
        proj = self.patch_embed.proj
        x = F.linear(torch.cat(patches), proj.weight.flatten(1), proj.bias)
        rows = self.patch_embed.norm(x).split([len(y) for y in patches])
        return [row.view(1, image.shape[1] // p, image.shape[2] // q, -1) for row, image in zip(rows, images, strict=True)]

    def forward_intermediates(
        self, x: torch.Tensor, indices: int | list[int] | None = None, return_prefix_tokens: bool = False, norm: bool = False,
        stop_early: bool = False, output_fmt: str = 'NCHW', intermediates_only: bool = False, output_dict: bool = False,
    ) -> Any:
        """Features after the blocks `indices` (the last n, those listed, or all) of images `[B, C, H, W]`, as timm's models.

        Each is a map `[B, D, h, w]`, or patches `[B, h * w, D]` with `output_fmt='NLC'`, with `norm` after the last norm, with
        `return_prefix_tokens` in a pair with the class token `[B, 1, D]`. `stop_early` skips the blocks that nothing needs.

        Returns:
            `(features, intermediates)`; with `intermediates_only` the list of intermediates; with `output_dict` a dictionary
            (`image_intermediates`, `image_intermediates_prefix`, `image_features`).

        Raises:
            ValueError: another `output_fmt`.
        """
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.blocks), indices)
        h, w = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x, found = self.embed(x), []
        for i, block in enumerate(self.blocks[:last + 1] if stop_early else self.blocks):
            x = self.run_block(block, x)
            if i in taken:
                found.append(self.finish(self.norm(x) if norm else x))

        prefix = [y[:, :self.num_prefix_tokens] for y in found]
        found = [y[:, self.num_prefix_tokens:] for y in found]
        if output_fmt == 'NCHW':
            found = [rearrange(y, 'b (h w) d -> b d h w', h=h, w=w).contiguous() for y in found]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            result: dict[str, Any] = {'image_intermediates': found}
            if with_prefix:
                result['image_intermediates_prefix'] = prefix
            if not intermediates_only:
                result['image_features'] = self.finish(self.norm(x))
            return result
        results = list(zip(found, prefix, strict=True)) if with_prefix else found
        return results if intermediates_only else (self.finish(self.norm(x)), results)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True,
    ) -> list[int]:
        """Remove the blocks after the last of `indices`, and optionally the norm and the classifier."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[:last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return taken


def check_pool(global_pool: str, class_token: bool) -> None:
    if global_pool not in POOLS or (global_pool == 'token' and not class_token):
        pools = [x for x in POOLS if class_token or x != 'token']
        raise ValueError(f'global_pool must be one of {pools}, got {global_pool!r}')
