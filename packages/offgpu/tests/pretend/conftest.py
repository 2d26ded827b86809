import inspect

import pytest

from offgpu.pretend import is_installed

# they need the device before torch is imported: `make test-device`
if not is_installed():
    collect_ignore_glob = ['test_*.py']


@pytest.fixture
def kernels(monkeypatch):
    """Longhorn's own, not what stands in for them where it must be fast."""
    from fla_longhorn.ops import triton as backend

    for name in ('longhorn_fwd', 'longhorn_bwd'):
        monkeypatch.setattr(backend, name, inspect.unwrap(getattr(backend, name)))
