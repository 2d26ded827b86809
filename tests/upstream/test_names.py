"""A new fla or transformers that lacks what we use fails here, with the name."""

import importlib
import inspect

import pytest
from fla import backends
from fla.models import modeling_utils

from fla_cpu import flash_attention
from fla_longhorn.attn_mode import FAMILIES
from tests import forks
from tests.upstream.names import missing, paths


def test_nothing_is_gone():
    lines = missing()
    assert not lines, '\n'.join(lines)


@pytest.mark.parametrize('family', FAMILIES)
def test_families(family):
    """The module, the block, its constructor that looks the mixer up by name, and classes with a forward of their own."""
    known = FAMILIES[family]
    module = importlib.import_module(known.module)
    assert hasattr(module, known.block), f'{known.module}.{known.block} is gone'
    assert hasattr(module, known.native), f'{known.module}.{known.native} is gone'
    assert known.find_block(), f'{known.module}.{known.block} does not build its mixer by the name {known.native}'
    for name, shared in known.forwards.items():
        assert 'forward' in vars(getattr(module, name)), f'{known.module}.{name}.forward is gone'
        assert 'forward' in vars(getattr(modeling_utils, shared)), f'{modeling_utils.__name__}.{shared}.forward is gone'


@pytest.mark.parametrize('module', flash_attention.MODULES)
def test_modules_that_look_for_flash_attention(module):
    source = inspect.getsource(importlib.import_module(module))
    assert 'flash_attn_func' in source, f'{module} no longer reads flash_attn_func'


def test_cpu_implementations_take_what_fla_passes():
    """A parameter that fla adds, drops or renames shows before a call fails."""
    for entry_point, registry in backends._function_registries.items():
        if 'cpu' in registry._backends:
            ours = registry._backends['cpu'].implementation
            name = f'{entry_point.__module__}.{entry_point.__name__}'
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(entry_point).parameters), name


def test_command():
    done = forks.run('-m', 'tests.upstream.names')
    assert done.returncode == 0 and f'all {len(paths())} names are there' in done.stdout, done.stdout + done.stderr
