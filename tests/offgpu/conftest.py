"""Kernels are compiled here, which Triton's interpreter cannot: these tests run without it only."""

from tests.conftest import INTERPRETING

collect_ignore_glob = ['test_*.py'] if INTERPRETING else []
