"""An operator's options are passed on in one value, and allocations say what they make."""

import ast
import inspect
from pathlib import Path

from fla_longhorn.ops import (
    chunk_longhorn,
    fused_recurrent_longhorn,
    longhorn_state_update,
    naive_chunk_longhorn,
    naive_recurrent_longhorn,
)
from fla_longhorn.ops.arguments import Arguments
from fla_longhorn.ops.pool import Pool


def test_arguments_are_the_public_ones_in_order():
    """The ops hand theirs on by position."""
    public = list(inspect.signature(chunk_longhorn).parameters)
    others = ('cu_seqlens_cpu', 'cp_context', 'return_intermediate_states')
    assert [x for x in public if x not in others] == list(Arguments._fields)
    for op in (fused_recurrent_longhorn, naive_chunk_longhorn, naive_recurrent_longhorn):
        assert inspect.signature(op).parameters == inspect.signature(chunk_longhorn).parameters
    own = [name for name in inspect.signature(longhorn_state_update).parameters if name != 'state']
    others = ('initial_state', 'output_final_state', 'cp_context', 'return_intermediate_states', 'disable_recompute')
    shared = [x for x in public if x not in others]
    assert [x for x in own if x not in Pool._fields] == shared
    assert [x for x in own if x in Pool._fields] == list(Pool._fields[1:])


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
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    parameters = [call.args[0] for call in calls if ast.unparse(call.func) == 'nn.Parameter' and call.args]
    found = []
    for call in calls:
        # the function may be chosen among several
        functions = (call.func.body, call.func.orelse) if isinstance(call.func, ast.IfExp) else (call.func,)
        wanted = set().union(*(ALLOCATIONS.get(ast.unparse(x).removeprefix('torch.'), ()) for x in functions))
        given = {x.arg for x in call.keywords}
        if call not in parameters and None not in given and not wanted <= given:
            found.append(call.lineno)
    return found


ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / 'fla_longhorn', *ROOT.glob('packages/*/fla*'))
PACKAGE = {str(path): path for folder in FOLDERS for path in folder.rglob('*.py')}


def test_allocations_say_their_dtype_and_device():
    silent = {name: silent_allocations(ast.parse(path.read_text(encoding='utf-8'))) for name, path in PACKAGE.items()}
    assert {name: lines for name, lines in silent.items() if lines} == {}
