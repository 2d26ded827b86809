"""Checkpoints that load with `trust_remote_code=True` in programs that do not import the package.

transformers runs the file that `auto_map` in `config.json` names. This file only imports the installed package, or raises an
error that names it; a checkpoint carries no copy of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import transformers

MODULE = 'longhorn'
AUTO_CLASSES = ('AutoModel', 'AutoModelForCausalLM', 'AutoModelForSequenceClassification', 'AutoModelForTokenClassification')
CODE = '''\
"""This checkpoint's classes, from installed packages: pip install fla-longhorn"""

try:
    import fla_longhorn  # noqa: F401
    from fla.models import {names}  # noqa: F401
except ImportError as error:
    raise ImportError(f'this checkpoint holds Longhorn: pip install fla-longhorn ({{error}})') from error
'''


def write_code_for(config: Any, model: Any) -> None:
    """Let checkpoints of Longhorn's own classes have the file; the classes themselves know nothing of it."""
    config.save_pretrained = wrap_save_pretrained(config.save_pretrained)
    for cls in (config, model):
        cls.register_for_auto_class = staticmethod(register_for_auto_class)


def wrap_save_pretrained(save: Callable) -> Callable:
    """Wrap a config's `save_pretrained`, which models and the Trainer call too, so that it writes the file."""
    @wraps(save)
    def save_pretrained(self, save_directory, *args, **kwargs):
        if 'longhorn' in (self.model_type, getattr(self, 'attn_mode', None)):
            write_code(self, Path(save_directory))
        elif refers_to_code(getattr(self, 'auto_map', None)):
            # `attn_mode` has changed since the config was saved
            del self.auto_map
        return save(self, save_directory, *args, **kwargs)

    return save_pretrained


def write_code(config: Any, folder: Path) -> None:
    """Write the file into `folder`, and `auto_map` into `config`."""
    classes: dict[str, Any] = {'AutoConfig': type(config)}
    for name in AUTO_CLASSES:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            classes[name] = mapping[type(config)]
    config.auto_map = {auto: f'{MODULE}.{cls.__name__}' for auto, cls in classes.items()}
    # else transformers copies the source file of a class that it loaded by `auto_map`
    config._auto_class = None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f'{MODULE}.py').write_text(CODE.format(names=', '.join(sorted(cls.__name__ for cls in classes.values()))))


def refers_to_code(auto_map: dict[str, str] | None) -> bool:
    # `repository--module.Class` where it came from a hub
    own = [x.rpartition('--')[2].startswith(f'{MODULE}.') for x in (auto_map or {}).values()]
    return bool(own) and all(own)


def is_remote_code() -> bool:
    """transformers' method: it must not copy the source files of a model with Longhorn into a checkpoint."""
    return False


def register_for_auto_class(auto_class: str | type | None = None) -> None:
    """transformers' method, which it calls when it has loaded a class: does nothing, all checkpoints have `auto_map`."""
