"""Installs the device: in this process before it imports torch, and through the environment in child processes."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from offgpu.pretend import binding, library, torch_side, triton_driver
from offgpu.pretend.hooks import after_import

# its sitecustomize.py calls `install`
SITE = Path(__file__).parent / 'site'
_installed = False


def is_installed() -> bool:
    return _installed


def install() -> None:
    """Make torch and Triton find the device when they are imported; modules in PRETEND_IMPORT may add hooks."""
    global _installed
    if _installed:
        return
    if 'torch' in sys.modules:
        raise RuntimeError('the pretend device must be installed before torch is imported')
    _installed = True
    after_import('torch._C', binding.provide)
    after_import('torch', finish, before=library.load)
    for name in filter(None, os.environ.get('PRETEND_IMPORT', '').split(',')):
        importlib.import_module(name)


def finish(torch) -> None:
    torch_side.patch(torch)
    triton_driver.install()


def activate() -> None:
    """Install it here, and in every Python started with this process's environment."""
    os.environ['PYTHONPATH'] = with_site(os.environ.get('PYTHONPATH', ''))
    os.environ['PRETEND_CUDA'] = '1'
    install()


def with_site(path: str) -> str:
    """A PYTHONPATH with the folder of sitecustomize.py in front."""
    return os.pathsep.join([str(SITE), *(x for x in path.split(os.pathsep) if x and x != str(SITE))])
