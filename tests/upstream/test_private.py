"""Private names of PyTorch in the core: those that fla uses too, and a few for which PyTorch has nothing public."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import fla
import torch
import torch.nn as nn

from fla_longhorn.ops.operator import longhorn_fwd
from tests.upstream.core import find_core

# beside each is said what goes wrong without it
KEPT = {
    'torch._C._are_functorch_transforms_active': {'ops.arguments'},
    'torch._C._len_torch_dispatch_stack': {'ops.arguments'},
    'torch.autograd.forward_ad._current_level': {'ops.arguments'},
    # a module's hooks and parameters, where a decoding step has no time for its methods
    'torch.nn.modules.module._has_any_global_hook': {'modules.dispatch'},
    **dict.fromkeys(('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks'), {'modules.dispatch'}),
    '_parameters': {'modules.dispatch'},
}
# attributes of its objects, which any expression may be
OBJECTS = (
    nn.Module(), torch.ones(0), torch.ones(0).untyped_storage(), torch.autograd.Function, torch.ops.aten.add.Tensor,
    longhorn_fwd,
)
ATTRIBUTES = {name for x in OBJECTS for name in dir(x) if name.startswith('_') and not name.endswith('__')}


def cut(name: str) -> str | None:
    """A name of PyTorch up to its last private part, `None` if it has none."""
    parts = name.split('.')
    private = [i for i, part in enumerate(parts) if part.startswith('_') and not part.endswith('__')]
    return '.'.join(parts[:private[-1] + 1]) if private and parts[0] == 'torch' else None


def names_in(tree: ast.AST) -> Iterator[str]:
    """Names of modules of PyTorch and of what they hold, in full, and attributes' names, which strings may give as well."""
    known = {'torch': 'torch'}

    def resolve(node: ast.AST | None) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        of = resolve(node.value) if isinstance(node, ast.Attribute) else None
        return None if of is None else f'{of}.{node.attr}'

    # outer nodes come first, and so does what a module begins with
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
                known |= {alias.asname: alias.name for alias in node.names if alias.asname}
            case ast.ImportFrom():
                found = {alias.asname or alias.name: f'{node.module}.{alias.name}' for alias in node.names}
                yield from found.values()
                known |= {name: full for name, full in found.items() if full.startswith('torch.')}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if resolve(node.value):
                known[name] = resolve(node.value) or ''
            case ast.Attribute():
                yield resolve(node) or node.attr
            case ast.FunctionDef(name=name) | ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                yield name


def private_names(files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for path in files:
        tree = ast.parse(path.read_text(encoding='utf-8'))
        # what a class of the file sets itself is its own
        own = {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)}
        found = {name if name in ATTRIBUTES - own else cut(name) or '' for name in names_in(tree)} - {''}
        # `torch._C.name` has `torch._C` in it
        yield from ((path, name) for name in found if not any(other.startswith(f'{name}.') for other in found))


def test_private_names():
    of_fla = {name for _, name in private_names(Path(fla.__file__).parent.rglob('*.py'))}
    modules, found = {path: module.removeprefix('fla_longhorn.') for module, path in find_core().items()}, defaultdict(set)
    for path, name in private_names(modules):
        if name not in of_fla:
            found[name].add(modules[path])
    assert found == KEPT
