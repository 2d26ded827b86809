"""Raise for a missing dependency in one line that says what to install, before an import fails inside fla.

pip checks neither torch nor triton, which come with an extra: an older build that is there stays.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

EXTRAS = "pip install 'fla-longhorn[cpu]' or 'fla-longhorn[cuda]'"
# distribution -> (versions, how to install it)
REQUIREMENTS = {
    'torch': ('>=2.11', EXTRAS),
    'triton': ('>=3.6', EXTRAS),
    'flash-linear-attention': ('>=0.6,<0.7', 'pip install fla-longhorn'),
    'transformers': ('>=5.6.2,<6', 'pip install fla-longhorn'),
}
# triton is installed under one of these names
ALIASES = {'triton': ('triton', 'pytorch-triton-rocm', 'triton-rocm', 'triton-windows', 'pytorch-triton-xpu', 'triton-xpu')}


def check_requirements(requirements: dict[str, tuple[str, str]] = REQUIREMENTS) -> None:
    """Raise `ImportError` for the first distribution that is missing or too old; warn about those that are too new."""
    for name, (bounds, remedy) in requirements.items():
        found = installed_version(name)
        if found is None:
            raise ImportError(f'fla-longhorn needs {name}{bounds}, which is not installed: {remedy}')
        # builds from source have versions such as 2.7.0a0+git
        release = Version(Version(found).base_version)
        if release in SpecifierSet(bounds):
            continue
        if release not in SpecifierSet(bounds.partition(',<')[0]):
            raise ImportError(f'fla-longhorn needs {name}{bounds}, found {found}: {remedy}')
        warnings.warn(f'fla-longhorn was tested with {name}{bounds}, found {found}', stacklevel=2)


def installed_version(name: str) -> str | None:
    for alias in ALIASES.get(name, (name,)):
        try:
            return version(alias)
        except PackageNotFoundError:
            continue
    return None
