"""Raise for a missing dependency in one line that says what to install, before an import fails inside fla."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

EXTRAS = "pip install '.[cpu]' or '.[cuda]' in a checkout"
# distribution -> (lowest version, how to install it). pip checks neither torch nor triton, which come with an extra
REQUIREMENTS = {
    'torch': ('>=2.11', EXTRAS), 'triton': ('>=3.6', EXTRAS),
    'flash-linear-attention': ('>=0.6', EXTRAS), 'transformers': ('>=5.6.2', EXTRAS),
}
# triton is installed under one of these names
TRITON = ('triton', 'pytorch-triton-rocm', 'triton-rocm', 'triton-windows', 'pytorch-triton-xpu', 'triton-xpu')


def check_requirements(requirements: dict[str, tuple[str, str]] = REQUIREMENTS) -> None:
    """Raise `ImportError` for the first distribution that is missing or too old."""
    for name, (bounds, remedy) in requirements.items():
        found = [x for x in map(installed_version, TRITON if name == 'triton' else (name,)) if x is not None]
        # builds from source have versions such as 2.7.0a0+git
        if not found or Version(Version(found[0]).base_version) not in SpecifierSet(bounds):
            what = f'found {found[0]}' if found else 'which is not installed'
            raise ImportError(f'fla-longhorn needs {name}{bounds}, {what}: {remedy}')


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
