"""Checkpoints that load with `trust_remote_code=True` where the package is installed but not imported.

transformers runs the file that `auto_map` in `config.json` names. Here that is one import: the code stays the installed
package's, and a checkpoint never carries an old copy of it.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from fla_longhorn.models.longhorn.configuration_longhorn import LonghornConfig
from fla_longhorn.models.longhorn.modeling_longhorn import LonghornForCausalLM, LonghornModel

FILE = 'longhorn.py'
CODE = '''\
"""Longhorn's classes, from the installed package: pip install fla-longhorn"""

from fla_longhorn.models.longhorn.remote_code import LonghornConfig, LonghornForCausalLM, LonghornModel  # noqa: F401
'''
AUTO_MAP = {
    'AutoConfig': 'longhorn.LonghornConfig',
    'AutoModel': 'longhorn.LonghornModel',
    'AutoModelForCausalLM': 'longhorn.LonghornForCausalLM',
}

_registered = False


def register_for_auto_class(auto_class: str | type | None = None) -> None:
    """From now on `save_pretrained` of Longhorn's models and configs writes checkpoints that need no import of the package.

    `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` loads them. This is also what transformers'
    `LonghornConfig.register_for_auto_class()` does once this module is imported, and what transformers calls when it has
    loaded such a checkpoint, so that what is saved after it is again one.

    Args:
        auto_class (str or type, Optional):
            Ignored: all of `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` are served. Default: `None`.

    Examples::
        >>> register_for_auto_class()
        >>> model.save_pretrained('checkpoint')
    """
    global _registered
    _registered = True


def _save_pretrained(save):
    """`LonghornConfig.save_pretrained`, which models and the Trainer come through too: writes the code as well."""
    @wraps(save)
    def save_pretrained(self, save_directory, *args, **kwargs):
        if _registered or getattr(self, 'auto_map', None):
            self.auto_map = dict(AUTO_MAP)
            folder = Path(save_directory)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).write_text(CODE)
        return save(self, save_directory, *args, **kwargs)

    return save_pretrained


_class: Any = LonghornConfig
_class.save_pretrained = _save_pretrained(LonghornConfig.save_pretrained)
for _class in (LonghornConfig, LonghornModel, LonghornForCausalLM):
    _class.register_for_auto_class = staticmethod(register_for_auto_class)
