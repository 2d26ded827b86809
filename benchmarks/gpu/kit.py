"""The folder that `make gpu-kit` makes: packages that a machine lacks and Triton's cache, packed; and what unpacks it."""

from __future__ import annotations

import hashlib
import json
import lzma
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

# neither asks for another that the machine lacks
PACKAGES = ('flash-linear-attention', 'fla-core')
# what a launch reads of a kernel's files; launchers lie in folders of their own
KEPT = ('.cubin', '.json')
ABOUT, CACHE = 'kit.json', 'cache.tar.xz'


def pack(cache: Path, used: set[str], folder: Path, about: dict) -> int:
    """Write the kit, with the kernels in the folders `used` of the cache, to `folder`; returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    wheels = [f'{name}=={version(name)}' for name in PACKAGES]
    download = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--dest', str(folder)]
    subprocess.run([*download, *wheels], check=True)
    with lzma.open(folder / CACHE, 'wb', preset=6) as stream, tarfile.open(fileobj=stream, mode='w') as archive:
        # files that resemble each other lie side by side
        for path in sorted(cache.glob('*/*'), key=lambda path: (path.suffix, path.name, path.parent.name)):
            if path.is_file() and (path.suffix in KEPT and path.parent.name in used or path.suffix == '.so'):
                archive.add(path, path.relative_to(cache))
    (folder / ABOUT).write_text(json.dumps(about | made_with(), indent=1) + '\n')
    return sum(path.stat().st_size for path in folder.iterdir())


def made_with() -> dict[str, str]:
    """What a key of the cache holds beside a kernel and its arguments."""
    from triton.runtime.cache import triton_key

    key = hashlib.sha256(triton_key().encode()).hexdigest()
    return {'triton': version('triton'), 'triton_key': key, 'torch': version('torch'), 'python': platform.python_version()}


def unpack(kit: Path) -> dict[str, str]:
    """Unpack into a folder of this kit's own, once; the environment of processes that use it."""
    digest = hashlib.sha256((kit / ABOUT).read_bytes()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f'fla-longhorn-kit-{digest}'
    cache, site, done = folder / 'triton', folder / 'site', folder / 'done'
    if not done.exists():
        for wheel in kit.glob('*.whl'):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        with lzma.open(kit / CACHE) as stream, tarfile.open(fileobj=stream) as archive:
            archive.extractall(cache, filter='data')
        relocate(cache)
        done.touch()
    about, here = json.loads((kit / ABOUT).read_text()), made_with()
    if about['triton_key'] != here['triton_key']:
        print(f"the kit is for another build of Triton ({about['triton']}) than {here['triton']}: all is compiled", flush=True)
    return {'TRITON_CACHE_DIR': str(cache), 'PYTHONPATH': str(site)}


def relocate(cache: Path) -> None:
    """A kernel's list of files has their whole paths, and lists those that are not kept."""
    for path in cache.glob('*/__grp__*'):
        names = json.loads(path.read_text())['child_paths']
        kept = {name: str(path.parent / name) for name in names if (path.parent / name).exists()}
        path.write_text(json.dumps({'child_paths': kept}))
