"""What stands beside the plugin uses what it offers, and changes nothing in it but by the entry points' door."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forks
from tests.test_patches import HELD

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / 'tests/surface.json').read_text(encoding='utf-8'))['names']
# called on a table, they change it
CHANGING = {
    'add', 'append', 'clear', 'discard', 'extend', 'insert', 'pop', 'popitem', 'register', 'remove', 'setdefault', 'update',
}
# their first argument's attribute or entry is set
SETTING = {'delattr', 'setattr', 'set_attribute', 'object', 'dict', 'wrap_attribute'}
# what a package sets by `changes.set_attribute`, which `patch(packages=False)` takes back
BY_THE_DOOR = {
    'packages/extras/fla_longhorn_extras/__init__.py: changes.set_attribute(LonghornConfig)',
    'packages/extras/fla_longhorn_extras/__init__.py: changes.set_attribute(LonghornForCausalLM)',
}
# what a measuring tool replaces in a `with`, to see or to count what runs
FOR_A_WHILE = {
    'benchmarks/gpu/filling.py: mock.patch.object(backends)',
    'benchmarks/gpu/tuning.py: mock.patch.object(LaunchConfig)',
    'benchmarks/operators.py: mock.patch.object(dispatch)',
}


def files(*folders: str) -> dict[str, ast.Module]:
    """Source files by their place, without those of tests."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob('*.py'))]
    names = [path.relative_to(ROOT) for path in found]
    return {str(x): ast.parse((ROOT / x).read_text(encoding='utf-8')) for x in names if not {'tests', 'build'} & {*x.parts}}


def imported(tree: ast.AST) -> Iterator[tuple[str, str | None, str]]:
    """Of the plugin: module, what is taken of it, and the name that stands for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'fla_longhorn':
            yield from ((str(node.module), x.name, x.asname or x.name) for x in node.names)
        elif isinstance(node, ast.Import):
            for x in node.names:
                if x.name.split('.')[0] == 'fla_longhorn':
                    yield x.name, None, x.asname or 'fla_longhorn'


def unrecorded(tree: ast.AST) -> set[str]:
    """What is imported of the plugin and not in `tests/surface.json`."""
    used = {(x.value.id, x.attr) for x in ast.walk(tree) if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)}
    found = set()
    for module, name, own in imported(tree):
        whole = module if name is None else f'{module}.{name}'
        if whole in RECORDED:
            found |= {f'{whole}.{attribute}' for x, attribute in used if x == own and attribute not in RECORDED[whole]}
        elif name is None or name not in RECORDED.get(module, {}):
            found.add(whole)
    return found


@pytest.mark.parametrize('source, found', [
    ('from fla_longhorn.ops import chunk_longhorn', set()),
    ('from fla_longhorn import modules\nmodules.RMSNorm', set()),
    ('from fla_longhorn import modules\nmodules.cache', {'fla_longhorn.modules.cache'}),
    ('from fla_longhorn.ops.backends import loops', {'fla_longhorn.ops.backends.loops'}),
    ('def f():\n    import fla_longhorn.ops.backends as b', {'fla_longhorn.ops.backends'}),
])
def test_what_is_not_recorded_is_found(source, found):
    assert unrecorded(ast.parse(source)) == found


def test_hosts_import_what_is_recorded():
    found = {name: unrecorded(tree) for name, tree in files('packages/serving', 'packages/extras').items()}
    assert len(found) > 20 and {name: x for name, x in found.items() if x} == {}


def root_of(node: ast.AST) -> str | None:
    """The name that attributes and entries start from."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def changes(tree: ast.AST) -> set[str]:
    """Statements that set an attribute, or change a table, of what is imported of the plugin."""
    own = {name for _, _, name in imported(tree)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load) and root_of(node) in own:
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            *_, last = function.split('.')
            if last in SETTING and node.args and root_of(node.args[0]) in own:
                found.add(f'{function}({ast.unparse(node.args[0])})')
            if last in CHANGING and isinstance(node.func, ast.Attribute) and root_of(node.func.value) in own:
                found.add(f'{function}()')
    return found


@pytest.mark.parametrize('source, found', [
    ('import fla_longhorn\nfla_longhorn.ops.backends.loops = 1', {'fla_longhorn.ops.backends.loops'}),
    ('from fla_longhorn.ops import backends as b\nb.BACKENDS["x"] = b', {"b.BACKENDS['x']"}),
    ('from fla_longhorn.ops.backends import BACKENDS\nBACKENDS.update(x=1)', {'BACKENDS.update()'}),
    ('from fla_longhorn import LonghornConfig\nsetattr(LonghornConfig, "x", 1)', {'setattr(LonghornConfig)'}),
    ('from fla_longhorn import LonghornConfig\nconfig = LonghornConfig()\nconfig.gate = "head"', set()),
    ('from fla_longhorn.ops import pool\nwith patch.object(pool, "x", 1): pass', {'patch.object(pool)'}),
])
def test_changes_are_found(source, found):
    assert changes(ast.parse(source)) == found


def test_no_source_changes_the_plugin():
    trees = files('packages', 'benchmarks', 'examples', 'lab')
    assert len(trees) > 100
    assert {f'{name}: {x}' for name, tree in trees.items() for x in changes(tree)} == BY_THE_DOOR | FOR_A_WHILE


def test_packages_change_the_plugin_by_the_door_alone():
    """Not when they are imported; when they are registered, what the walk above knows; `patch(packages=False)` reverts it."""
    names = [x.name for x in ROOT.glob('packages/*/fla*') if (x / '__init__.py').exists()]
    assert len(names) == 5
    forks.output('-c', HELD + '''
before = held()
count = 0
for name in sys.argv[1:]:
    for found in pkgutil.walk_packages(importlib.import_module(name).__path__, f'{name}.', onerror=lambda name: None):
        if not found.name.endswith('__main__'):
            try:
                importlib.import_module(found.name)
                count += 1
            except ImportError as error:
                missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
                assert not missing.name.startswith('fla'), error
assert count > 30, count
assert not changed(before, held()), changed(before, held())
fla_longhorn.patch(packages=True)
assert changed(before, held()) == {
    ('fla_longhorn.ops.backends', 'loops'),
    ('fla_longhorn.models.longhorn.configuration_longhorn', 'LonghornConfig.base_model_tp_plan'),
    ('fla_longhorn.models.longhorn.modeling_longhorn', 'LonghornForCausalLM._tp_plan'),
}, changed(before, held())
fla_longhorn.patch(packages=False)
assert not changed(before, held()), changed(before, held())
''', *names, env={'FLA_LONGHORN_PATCH': 'names'})
