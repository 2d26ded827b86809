"""A kernel's key of Triton's cache is the same in every process, whichever kernels it used before."""

import json

from tests import forks

KEYS = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITCallable
from fla_longhorn.ops import triton as package

keys, step = {}, int(sys.argv[1])
names = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.')]
for name in names[::step]:
    for x in [*vars(importlib.import_module(name)).values()][::step]:
        while hasattr(x, 'fn') and not isinstance(x, JITCallable):
            x = x.fn
        if isinstance(x, JITCallable):
            keys[f'{x.__module__}.{x.__name__}'] = x.cache_key
print(json.dumps(keys))
"""


def keys_of(step: int) -> dict[str, str]:
    return json.loads(forks.output('-c', KEYS, step).splitlines()[-1])


def test_keys_do_not_depend_on_what_was_used_before() -> None:
    first, last = keys_of(1), keys_of(-1)
    assert len(first) > 60 and first.keys() == last.keys()
    assert not [name for name in first if first[name] != last[name]]
