"""Installs the pretend device at Python's start, with this folder on PYTHONPATH and PRETEND_CUDA=1."""

import importlib
import os
import sys

# first run the sitecustomize that this one hides
_folder = os.path.dirname(os.path.abspath(__file__))
_path = sys.path[:]
sys.path[:] = [x for x in _path if os.path.abspath(x) != _folder]
_own = sys.modules.pop('sitecustomize', None)
try:
    importlib.import_module('sitecustomize')
except ModuleNotFoundError as _error:
    if _error.name != 'sitecustomize':
        raise
finally:
    if _own is not None:
        sys.modules.setdefault('sitecustomize', _own)
    sys.path[:] = _path

if os.environ.get('PRETEND_CUDA') == '1':
    # the checkout, for programs in other folders
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_folder))))
    from offgpu.pretend import install

    install()
