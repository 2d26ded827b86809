from inspect import signature, unwrap

import torch
from fla import backends
from fla.modules.norm import l2norm

from fla_cpu.backend import verify_cpu
from tests import forks


def test_verifier_looks_at_the_first_tensor():
    here, elsewhere = torch.ones(1), torch.ones(1, device='meta')
    assert verify_cpu(here, elsewhere)[0]
    assert verify_cpu(None, 3, bias=None, x=here)[0]
    assert verify_cpu(elsewhere, here) == (False, 'the first tensor is on meta')
    assert verify_cpu(3, eps=1e-5) == (False, 'no tensor argument')


def test_implementations_take_what_fla_passes():
    """A parameter that fla adds, drops or renames shows before a call fails."""
    registries = backends._function_registries.items()
    ours = {x: registry._backends['cpu'] for x, registry in registries if 'cpu' in registry._backends}
    for entry_point, backend in ours.items():
        assert list(signature(backend.implementation).parameters) == list(signature(entry_point).parameters), entry_point


def test_switched_off_by_the_environment(monkeypatch):
    registry = backends._function_registries[unwrap(l2norm.l2norm_fwd)]
    assert registry.get_active().backend_type == 'cpu'
    monkeypatch.setenv('FLA_CPU', '0')
    assert registry.get_active() is None or registry.get_active().backend_type != 'cpu'


def test_imports_without_the_registry():
    code = """
from importlib import import_module
import fla_cpu
for name in fla_cpu.MODULES:
    import_module(f'fla_cpu.{name}')
from fla import backends
print(len(backends._function_registries))
"""
    assert forks.output('-c', code, fla=False, env={'FLA_DISABLE_BACKEND_DISPATCH': '1'}).split() == ['0']
