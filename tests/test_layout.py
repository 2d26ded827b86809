"""The layout: imports run downwards only, public names stay, an operator's options are handed on in one value."""

import ast
import importlib
import inspect
from itertools import chain
from pathlib import Path

import pytest

import fla_longhorn
from fla_longhorn.ops import chunk_longhorn, fused_recurrent_longhorn, longhorn_state_update, naive_recurrent_longhorn
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool

PACKAGE = Path(fla_longhorn.__file__).parent
# bottom up; a module imports from its own line or from a line above it in this list
FLOORS = [
    ['requirements', 'ops.arguments', 'ops.checkpoints', 'ops.last_read', 'ops.plain', 'ops.pool'],
    ['ops.triton', 'ops.numba', 'ops.torch'],
    ['ops.backend', 'ops.inputs'],
    ['ops.operator', 'ops.naive'],
    ['ops.context_parallel'],
    ['ops.apply'],
    ['ops.chunk', 'ops.fused_recurrent', 'ops.state_update'],
    ['ops'],
    ['cpu'],
    ['modules'],
    ['layers'],
    ['models'],
    ['attn_mode'],
    ['registry'],
    ['', 'selfcheck', 'evaluation', 'serving', 'vision', '__main__'],
]
# rooms on one floor that don't know each other
CLOSED = ('ops.triton', 'ops.numba', 'ops.torch', 'cpu')


def room(module: str) -> tuple[str, int]:
    """The line of `FLOORS` that a module's longest prefix stands in."""
    found = [(name, i) for i, names in enumerate(FLOORS) for name in names if f'{module}.'.startswith(f'{name}.') or not name]
    return max(found, key=lambda pair: len(pair[0]))


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, anywhere in it; names without the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {x if is_module(x) else node.module for x in (f'{node.module}.{alias.name}' for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {x.removeprefix('fla_longhorn').removeprefix('.') for x in found if x.split('.')[0] == 'fla_longhorn'}


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split('.'))
    return path.is_dir() or path.with_suffix('.py').is_file()


def modules() -> dict[str, Path]:
    names = {}
    for path in PACKAGE.rglob('*.py'):
        parts = path.relative_to(PACKAGE).with_suffix('').parts
        names['.'.join(parts[:-1] if parts[-1] == '__init__' else parts)] = path
    return names


def test_imports_run_downwards():
    upwards = []
    for module, path in modules().items():
        own, floor = room(module)
        for imported in imports(path):
            other, below = room(imported)
            closed = own != other and below == floor and {own, other} & set(CLOSED)
            if below > floor or closed:
                upwards.append(f'{module or "fla_longhorn"} imports {imported or "fla_longhorn"}')
    assert not upwards


def test_every_room_is_on_a_floor():
    """A new folder or file at the top of the package, or of `ops`, gets its place here."""
    known = set(chain(*FLOORS))
    top = {x.split('.')[0] for x in modules() if x}
    ops = {'.'.join(x.split('.')[:2]) for x in modules() if x.startswith('ops.')}
    assert top | ops <= known


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


def test_allocations_say_their_dtype_and_device():
    silent = {name: silent_allocations(ast.parse(path.read_text(encoding='utf-8'))) for name, path in modules().items()}
    assert {name: lines for name, lines in silent.items() if lines} == {}


@pytest.mark.parametrize(('call', 'silent'), [
    ('torch.empty(3)', True), ('torch.empty(3, dtype=x)', True), ('torch.empty(3, dtype=x, device=y)', False),
    ('torch.arange(3)', True), ('torch.arange(3, device=y)', False), ('x.new_empty(3)', False),
    ('(torch.empty if x else torch.zeros)(3)', True), ('nn.Parameter(torch.empty(3))', False),
    ('torch.ones(3, **like)', False),
])
def test_silent_allocations_are_found(call, silent):
    assert bool(silent_allocations(ast.parse(call))) == silent
