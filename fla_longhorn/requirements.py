"""Tell what is missing, in one line that names the extra to install, before an import fails deep inside fla."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

# distributions, each with its bounds and what installs it
REQUIREMENTS = (
    ('torch', (2, 7), None, "pip install 'fla-longhorn[cpu]' or 'fla-longhorn[cuda]'"),
    ('triton', (3, 6), None, "pip install 'fla-longhorn[cpu]' or 'fla-longhorn[cuda]'"),
    ('flash-linear-attention', (0, 6), (0, 7), 'pip install fla-longhorn'),
    ('transformers', (5, 6, 2), (6, 0), 'pip install fla-longhorn'),
)
# builds of triton that go by another name
ALIASES = {'triton': ('triton', 'pytorch-triton-rocm', 'triton-rocm', 'triton-windows', 'pytorch-triton-xpu', 'triton-xpu')}


def check_requirements(requirements=REQUIREMENTS) -> None:
    """Raise `ImportError` for the first distribution that is missing, too old or too new."""
    for name, lowest, below, remedy in requirements:
        wanted = f'{name}>={_dotted(lowest)}' + (f',<{_dotted(below)}' if below else '')
        found = installed_version(name)
        if found is None:
            raise ImportError(f'fla-longhorn needs {wanted}, which is not installed: {remedy}')
        digits = re.match(r'\d+(?:\.\d+)*', found)
        release = tuple(int(x) for x in digits[0].split('.')) if digits else ()
        if release < lowest or (below is not None and release >= below):
            raise ImportError(f'fla-longhorn needs {wanted}, found {found}: {remedy}')


def installed_version(name: str) -> str | None:
    for alias in ALIASES.get(name, (name,)):
        try:
            return version(alias)
        except PackageNotFoundError:
            continue
    return None


def _dotted(release: tuple[int, ...]) -> str:
    return '.'.join(map(str, release))
