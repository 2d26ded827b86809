"""Longhorn for images: the paper's Vision Longhorn (Table 3) among timm's models.

Importing it registers `vision_longhorn_{tiny,small,base}_patch16_224` with timm, and so with transformers' `TimmWrapper`
models. Needs `pip install './packages/extras[vision]'` (docs/vision.md).
"""

try:
    import timm  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"fla_longhorn_extras.timm needs timm: pip install './packages/extras[vision]' in a checkout ({error})"
    ) from error

from fla_longhorn_extras.timm import variants  # noqa: F401  registers them
from fla_longhorn_extras.timm.mixer import BidirectionalLonghorn
from fla_longhorn_extras.timm.model import VisionLonghorn

__all__ = ['BidirectionalLonghorn', 'VisionLonghorn']
