"""Public names stay, and an operator's options are passed on in one value."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import fla_cpu
import fla_longhorn
from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool

PUBLIC = {
    'fla_longhorn': [
        'Longhorn', 'LonghornConfig', 'LonghornForCausalLM', 'LonghornForSequenceClassification',
        'LonghornForTokenClassification', 'LonghornModel', 'chunk_longhorn', 'convert_official_state_dict',
        'fused_recurrent_longhorn', 'longhorn_state_update', 'naive_recurrent_longhorn', 'patch', 'register', 'unregister',
    ],
    'fla_cpu': ['Changes', 'register'],
    'fla_longhorn.ops': ['chunk_longhorn', 'fused_recurrent_longhorn', 'longhorn_state_update', 'naive_recurrent_longhorn'],
    'fla_longhorn.layers': ['Longhorn'],
    'fla_longhorn.models': ['LonghornConfig', 'LonghornForCausalLM', 'LonghornModel', 'convert_official_state_dict'],
    'fla_longhorn.selfcheck': ['main'],
}


@pytest.mark.parametrize('module', list(PUBLIC))
def test_public_names(module):
    exported = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(exported, name)] == []


def test_arguments_are_the_public_ones_in_order():
    """The ops hand theirs on by position."""
    public = list(inspect.signature(chunk_longhorn).parameters)
    assert public == [*Arguments._fields, 'cu_seqlens_cpu', 'cp_context', 'return_intermediate_states']
    for op in (fused_recurrent_longhorn, naive_recurrent_longhorn):
        assert inspect.signature(op).parameters == inspect.signature(chunk_longhorn).parameters
    own = [name for name in inspect.signature(longhorn_state_update).parameters if name != 'state']
    others = ('initial_state', 'output_final_state', 'cp_context', 'return_intermediate_states')
    shared = [x for x in public if x not in others]
    assert own == [*shared, *Pool._fields[1:]]


# what an allocation must say, for torch has defaults that callers change; integers of `arange` are int64 in any case
ALLOCATIONS = {
    **dict.fromkeys(('empty', 'zeros', 'ones', 'full', 'tensor', 'rand', 'randn', 'linspace', 'eye', 'empty_strided'),
                    {'dtype', 'device'}),
    **dict.fromkeys(('arange', 'randperm', 'randint'), {'device'}),
}


def silent_allocations(tree: ast.AST) -> list[int]:
    """Lines that call `torch.empty` and its kin without a dtype or a device, but those of parameters.

    Parameters are made by the defaults: so `from_pretrained(dtype=...)` makes a model.
    """
    parameters = {
        id(node.args[0]) for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'nn.Parameter' and node.args
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in parameters:
            # the function may be chosen among several
            functions = (node.func.body, node.func.orelse) if isinstance(node.func, ast.IfExp) else (node.func,)
            names = [ast.unparse(x).removeprefix('torch.') for x in functions]
            wanted = set().union(*(ALLOCATIONS.get(name, ()) for name in names))
            given = {x.arg for x in node.keywords}
            if None not in given and not wanted <= given:
                found.append(node.lineno)
    return found


PACKAGE = {str(path): path for package in (fla_cpu, fla_longhorn) for path in Path(package.__file__).parent.rglob('*.py')}


def test_allocations_say_their_dtype_and_device():
    silent = {name: silent_allocations(ast.parse(path.read_text(encoding='utf-8'))) for name, path in PACKAGE.items()}
    assert {name: lines for name, lines in silent.items() if lines} == {}
