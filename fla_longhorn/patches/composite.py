"""transformers' composite models, such as LLaVA, around a text model with Longhorn: their cache in `generate`, tied heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fla_longhorn.attn_mode.config import MODE, is_swapped
from fla_longhorn.modules.cache import CACHE, check_cache
from fla_longhorn.modules.rewind import RewindableCache


def has_longhorn(config: Any) -> bool:
    return getattr(config, 'model_type', None) == MODE or is_swapped(config)


def wrap_prepare_cache(method: Callable) -> Callable:
    """Let `generate` of a composite model make fla's cache, where transformers makes one of keys and values."""
    def run(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        text = self.config.get_text_config(decoder=True)
        if text is not self.config and has_longhorn(text):
            check_cache(model_kwargs.get(CACHE))
            if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
                model_kwargs[CACHE] = RewindableCache()
        return method(self, generation_config, model_kwargs, *args, **kwargs)

    return run


def wrap_tied_keys(method: Callable) -> Callable:
    """Let a head be tied to the `embed_tokens` of a text model, which fla names otherwise."""
    def run(self: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        return {target: find_embeddings(self, source) for target, source in method(self, *args, **kwargs).items()}

    return run


def find_embeddings(model: Any, source: str) -> str:
    path, _, name = source.rpartition('.embed_tokens.')
    if not path:
        return source
    try:
        decoder = model.get_submodule(path)
    except AttributeError:
        return source
    return f'{path}.{decoder._input_embed_layer}.{name}' if has_longhorn(getattr(decoder, 'config', None)) else source
