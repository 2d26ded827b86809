"""Tests of fla_longhorn_extras.timm run where timm is installed: `make test-vision`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec('timm') else ['test_*.py']
