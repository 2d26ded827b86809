"""Tests with torchao and bitsandbytes run where both are installed: `make test-quantized`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec('torchao') and find_spec('bitsandbytes') else ['test_*.py']
