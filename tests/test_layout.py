"""Public names stay, and an operator's options are passed on in one value."""

import importlib
import inspect

import pytest

from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool

PUBLIC = {
    'fla_longhorn': [
        'Longhorn', 'LonghornConfig', 'LonghornForCausalLM', 'LonghornModel', 'chunk_longhorn', 'convert_official_state_dict',
        'fused_recurrent_longhorn', 'longhorn_state_update', 'naive_recurrent_longhorn',
    ],
    'fla_longhorn.ops': ['chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update', 'naive_recurrent_longhorn'],
    'fla_longhorn.layers': ['Longhorn'],
    'fla_longhorn.models': ['LonghornConfig', 'LonghornForCausalLM', 'LonghornModel', 'convert_official_state_dict'],
    'fla_longhorn.selfcheck': ['main'],
    'fla.ops': ['chunk_longhorn', 'fused_recurrent_longhorn'],
    'fla.layers': ['Longhorn'],
    'fla.models': ['LonghornConfig', 'LonghornForCausalLM', 'LonghornModel'],
    'fla.ops.longhorn': ['chunk_longhorn', 'fused_recurrent_longhorn'],
    'fla.layers.longhorn': ['Longhorn'],
    'fla.models.longhorn': ['LonghornConfig', 'LonghornForCausalLM', 'LonghornModel'],
}


@pytest.mark.parametrize('module', list(PUBLIC))
def test_public_names(module):
    exported = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(exported, name)] == []


def test_arguments_are_the_public_ones_in_order():
    """The ops hand theirs on by position."""
    public = list(inspect.signature(chunk_longhorn).parameters)
    assert public == [*Arguments._fields, 'cu_seqlens_cpu', 'cp_context']
    for op in (fused_recurrent_longhorn, naive_recurrent_longhorn):
        assert inspect.signature(op).parameters == inspect.signature(chunk_longhorn).parameters
    own = [name for name in inspect.signature(longhorn_state_update).parameters if name != 'state']
    shared = [x for x in public if x not in ('initial_state', 'output_final_state', 'cp_context')]
    assert own == [*shared, *Pool._fields[1:]]
