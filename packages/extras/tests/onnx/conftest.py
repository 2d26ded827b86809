"""Tests in onnxruntime run where it is installed: `make test-onnx`."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec('onnxruntime') and find_spec('onnxscript') else ['test_*.py']
