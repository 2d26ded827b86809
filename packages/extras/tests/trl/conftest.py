"""Tests with TRL run where it is installed: `make test-trl`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec('trl') else ['test_*.py']
