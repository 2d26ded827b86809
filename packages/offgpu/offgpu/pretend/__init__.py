"""A CUDA device for PyTorch's CPU build, in the host's memory; see README.md."""

from offgpu.pretend.counting import Counts, counted
from offgpu.pretend.hooks import after_import
from offgpu.pretend.install import activate, install, is_installed

__all__ = ['Counts', 'activate', 'after_import', 'counted', 'install', 'is_installed']
