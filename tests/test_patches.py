"""What importing changes, part by part: applied, reverted exactly, and applied again."""

import json

import pytest

from fla_longhorn.patches import apply
from fla_longhorn.patches.changes import Changes
from tests import forks

# everything that fla's modules and classes, fla's registry and transformers' Auto classes hold
SNAPSHOT = '''
import importlib, pkgutil, sys, warnings, pytest
warnings.simplefilter('ignore')
import fla, fla.backends, transformers, transformers.trainer_pt_utils
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
for found in pkgutil.walk_packages(fla.__path__, 'fla.', onerror=lambda name: None):
    try:
        importlib.import_module(found.name)
    except Exception:
        pass

def snapshot():
    modules = {name: module for name, module in sys.modules.items() if name.split('.')[0] == 'fla'}
    held = {'modules': modules}
    for name, module in modules.items():
        held[name] = dict(vars(module))
        held[name, '__all__'] = list(getattr(module, '__all__', ()))
        for x in vars(module).values():
            if isinstance(x, type) and x.__module__.split('.')[0] == 'fla':
                # transformers notes on a class what it found out when it built one
                held[x] = {name: value for name, value in vars(x).items() if not name.endswith('_cached_value')}
    for entry_point, registry in fla.backends._function_registries.items():
        held[entry_point] = dict(registry._backends)
    for x, name in (
        (transformers.GenerationMixin, '_prepare_cache_for_generation'),
        (transformers.PreTrainedModel, 'get_expanded_tied_weights_keys'),
    ):
        held[x] = {name: vars(x)[name]}
    for name in ('transformers.trainer', 'transformers.trainer_pt_utils'):
        if name in sys.modules:
            held[name, 'get_parameter_names'] = [sys.modules[name].get_parameter_names]
    held['configs'] = dict(CONFIG_MAPPING._extra_content)
    held['transformers'] = {name: x for name, x in vars(transformers).items() if name.endswith('ForCausalLM')}
    held['listed'] = dict(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for auto in (AutoModel, AutoModelForCausalLM):
        held[auto] = dict(auto._model_mapping._extra_content)
    return held

def same(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for place in a:
        x, y = a[place], b[place]
        if isinstance(x, dict):
            assert x.keys() == y.keys(), (place, x.keys() ^ y.keys())
            assert all(x[key] is y[key] for key in x), (place, [key for key in x if x[key] is not y[key]])
        else:
            assert x == y, place
'''


def test_unregister_restores_everything(device):
    forks.output('-c', SNAPSHOT + '''
from fla.models.gla.modeling_gla import GLABlock
from tests import plain_fla
plain_fla.install()
before = snapshot()
import fla_longhorn
registered = snapshot()
# what others put on top stays, and then so does all else
ours, GLABlock.__init__ = GLABlock.__init__, lambda *args: None
with pytest.raises(RuntimeError, match='GLABlock.__init__ was replaced since'):
    fla_longhorn.unregister()
assert GLABlock.__init__ is not ours and hasattr(fla.ops, 'chunk_longhorn')
GLABlock.__init__ = ours
fla_longhorn.unregister()
same(before, snapshot())
with pytest.raises(ValueError, match='longhorn'):
    AutoConfig.for_model('longhorn')
fla_longhorn.unregister()
same(before, snapshot())
fla_longhorn.register()
again = snapshot()
assert registered.keys() == again.keys()
assert all(registered[place].keys() == again[place].keys() for place in again if isinstance(again[place], dict))
assert fla.__all__.count('Longhorn') == 1
import torch
tiny = dict(hidden_size=32, num_hidden_layers=1, vocab_size=16)
ids = torch.arange(8, device=sys.argv[1])[None]
for name, options in {'longhorn': {}, 'gla': {'num_heads': 2}, 'rwkv7': {'head_dim': 16}}.items():
    mode = {} if name == 'longhorn' else {'attn_mode': 'longhorn'}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **tiny, **options, **mode)).to(ids.device)
    assert any(isinstance(module, fla_longhorn.Longhorn) for module in model.modules()), name
    model(ids, labels=ids).loss.backward()
fla_longhorn.unregister()
same(before, snapshot())
''', device)


# where a part changes something, and only there
PLACES = {
    'names': r'fla(\.(ops|layers|models)(\.longhorn)?)?|configs|listed|Auto.*',
    'attn_mode': r'class \w+',
    'packages': r'dispatched|fla\.modules\.[\w.]+|class (FusedCrossEntropyLoss|L2Wrap)|transformers',
    'trainer': r'transformers\.trainer(_pt_utils)?',
}


def test_parts():
    """Each alone changes its places and no others, and is reverted exactly; none of them is needed to run the ops."""
    forks.output('-c', SNAPSHOT + '''
import json, re, torch
before = snapshot()
from fla_longhorn.ops import chunk_longhorn, naive_recurrent_longhorn
same(before, snapshot())
q, k, v, beta = (torch.rand(1, 9, 1, n) for n in (4, 4, 6, 6))
v.requires_grad_()
o, want = chunk_longhorn(q, k, v, beta)[0], naive_recurrent_longhorn(q, k, v, beta)[0]
assert (o - want).abs().max() < 1e-5
assert torch.autograd.grad(o.sum(), v)[0].any()
same(before, snapshot())
import fla_longhorn
from fla_longhorn.patches import PARTS

def name_of(place):
    if isinstance(place, type):
        return place.__name__ if place.__name__.startswith('Auto') else f'class {place.__name__}'
    return 'dispatched' if callable(place) else place[0] if isinstance(place, tuple) else place

def changed(a, b):
    return {name_of(x) for x in a.keys() | b.keys() if x != 'modules' and (x not in a or x not in b or a[x] != b[x])}

places = json.loads(sys.argv[1])
assert places.keys() == PARTS.keys()
for part in PARTS:
    fla_longhorn.patch(**{part: True})
    after = snapshot()
    found = changed(before, after)
    # what the packages that are installed change
    assert (found or part == 'packages') and all(re.fullmatch(places[part], x) for x in found), (part, found)
    fla_longhorn.patch(**{part: True})
    same(after, snapshot())
    fla_longhorn.patch(**{part: False})
    same(before, snapshot())
fla_longhorn.patch(names=True, packages=True)
fla_longhorn.patch(names=False, trainer=True)
fla_longhorn.unregister()
same(before, snapshot())
for wrong in ({'cpus': True}, {'packages': True, 'gpu': False}):
    with pytest.raises(ValueError, match='patch takes names, attn_mode, packages, .*, got '):
        fla_longhorn.patch(**wrong)
same(before, snapshot())
''', json.dumps(PLACES), env={'FLA_LONGHORN_PATCH': 'none'})


# what the plugin's own modules and classes hold, by module and name; of mappings, lists and sets, what they hold
HELD = '''
import importlib, json, pkgutil, sys, types, pytest, torch
import fla_longhorn

for found in pkgutil.walk_packages(fla_longhorn.__path__, 'fla_longhorn.'):
    if not found.name.endswith('__main__'):
        importlib.import_module(found.name)

def of_classes(module):
    # own attributes of its classes
    own = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    return [(f'{x.__name__}.{y}', value) for x in own for y, value in vars(x).items() if not y.startswith('__')]

def entries(value):
    if isinstance(value, (set, frozenset)):
        return {id(x) for x in value}
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(str(key), id(x)) for key, x in inside]

def held():
    values = {}
    for name, module in list(sys.modules.items()):
        # the part that is applied is on the list of those that are
        if name.split('.')[0] == 'fla_longhorn' and name != 'fla_longhorn.patches.apply':
            for x, value in [*vars(module).items(), *of_classes(module)]:
                if value is not sys.modules.get(f'{name}.{x}') and not x.startswith('__'):
                    values[name, x] = id(value), entries(value)
    return values

def changed(a, b):
    return {x for x in a.keys() | b.keys() if a.get(x) != b.get(x)}
'''


def test_what_a_package_brings():
    """It is used while the part is applied, and one package alone may bring it."""
    forks.output('-c', HELD + '''
from fla_longhorn.ops import torch as in_pytorch
from fla_longhorn.ops.backends import token_loops
from fla_longhorn.patches import parts

calls = []

class Loops:
    def is_available(self):
        return True

    def load_operators(self):
        return types.SimpleNamespace(longhorn_fwd=lambda *args, **options: (
            calls.append('operator'), in_pytorch.longhorn_fwd(*args, **options),
        )[1])

    def of_modules(self, *tensors):
        calls.append('module')
        return types.SimpleNamespace(rms_norm=lambda x, weight, eps: x)

    def of_token(self):
        calls.append('token')
        return types.SimpleNamespace(mix_layer=lambda layer, x, *inputs: x)

norm, x = fla_longhorn.modules.RMSNorm(8), torch.rand(1, 3, 1, 8)

@torch.no_grad()
def called():
    calls.clear()
    fla_longhorn.chunk_longhorn(x, x, x, x)
    assert (norm(x) is x) == (token_loops(x) is not None) == bool(calls)
    return calls

package = types.SimpleNamespace(load=lambda: lambda changes: Loops(), value='made_up:register')
installed = [package]
parts.entry_points = lambda group: installed
before = held()
assert called() == []
for _ in range(2):
    fla_longhorn.patch(packages=True)
    assert called() == ['operator', 'module', 'token'], calls
    fla_longhorn.patch(packages=False)
    assert called() == [] and not changed(before, held())
installed.append(package)
with pytest.raises(ValueError, match='one package may bring loops for the CPU, got two: uninstall made_up:register'):
    fla_longhorn.patch(packages=True)
assert called() == [] and not changed(before, held())
''', env={'FLA_LONGHORN_PATCH': 'names', 'FLA_LONGHORN_BACKEND': ''})


@pytest.mark.parametrize(('value', 'parts'), [
    (None, apply.DEFAULT), ('', apply.DEFAULT), ('none', ()), ('names', ('names',)),
    ('packages, trainer', ('packages', 'trainer')),
])
def test_the_environment_chooses(value, parts):
    assert apply.asked(value) == parts


def test_a_part_that_there_is_not():
    with pytest.raises(ValueError, match=r"^FLA_LONGHORN_PATCH must name parts of names, .*, got \['cpus'\]"):
        apply.asked('names,cpus')


class Owner:
    own = 1


def test_nothing_is_reverted_where_one_thing_was_replaced():
    changes, mapping, names = Changes(), {'a': 1}, ['x']
    changes.set_attribute(Owner, 'own', 2)
    changes.set_attribute(Owner, 'new', 3)
    changes.append('names', names, 'y')
    changes.append('names', names, 'x')
    with changes.of_mapping('mapping', mapping):
        mapping.update(a=4, b=5)
    mapping['b'] = 6
    with pytest.raises(RuntimeError, match=r"^mapping\['b'\] was replaced"):
        changes.revert()
    assert (Owner.own, Owner.new, mapping, names) == (2, 3, {'a': 4, 'b': 6}, ['x', 'y'])
    mapping['b'] = 5
    changes.revert()
    assert (Owner.own, mapping, names) == (1, {'a': 1}, ['x'])
    assert not hasattr(Owner, 'new') and not changes.made
