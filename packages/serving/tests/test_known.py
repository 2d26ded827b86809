"""What all servers refuse."""

import pytest

import fla_longhorn_serving
from fla_longhorn import LonghornConfig


def test_options_that_a_host_has_not(monkeypatch):
    """vLLM and SGLang have the options in `KNOWN`."""
    config = LonghornConfig(gate='head', num_heads=2)
    fla_longhorn_serving.check_known('a host', config)
    monkeypatch.setattr(fla_longhorn_serving, 'KNOWN', [name for name in fla_longhorn_serving.KNOWN if name != 'gate'])
    with pytest.raises(ValueError, match="gate must be None in a host, which has no such option, got 'head'"):
        fla_longhorn_serving.check_known('a host', config)
    fla_longhorn_serving.check_known('a host', LonghornConfig())
