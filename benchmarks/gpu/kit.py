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
import time
import zipfile
from importlib.metadata import distributions, version
from pathlib import Path

from benchmarks.gpu.results import Results

# neither asks for another that the machine lacks
PACKAGES = ('flash-linear-attention', 'fla-core')
# what a launch reads of a kernel's files; launchers lie in folders of their own
KEPT = ('.cubin', '.json')
ABOUT, CACHE = 'kit.json', 'cache.tar.xz'
# what can be taken to such a machine beside the checkout
LIMIT = 64 * 2**20


def pack(cache: Path, results: Path, folder: Path) -> None:
    """Write what the run in `results` used of the cache, and the packages, to `folder`."""
    records = Results(results).records
    used = {name for record in records for name in record.get('used', [])}
    errors = {f'{record["stage"]}: {record.get("item")}': record['error'] for record in records if 'error' in record}
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    wheels = [f'{name}=={version(name)}' for name in PACKAGES]
    download = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--dest', str(folder)]
    subprocess.run([*download, *wheels], check=True)
    with lzma.open(folder / CACHE, 'wb', preset=3) as stream, tarfile.open(fileobj=stream, mode='w') as archive:
        # files that resemble each other lie side by side
        for path in sorted(cache.glob('*/*'), key=lambda path: (path.suffix, path.name, path.parent.name)):
            if path.is_file() and (path.suffix in KEPT and path.parent.name in used or path.suffix == '.so'):
                archive.add(path, path.relative_to(cache))
    about = made_with() | {'kernels': len(used), 'errors': errors, 'time': time.time()}
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + '\n')
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f'{folder}: {size / 2**20:.1f} MiB, {len(used)} kernels; failed without a GPU: {", ".join(errors) or "none"}')
    if size > LIMIT:
        raise SystemExit(f'{folder} must be at most {LIMIT / 2**20:.0f} MiB: leave out what uses most kernels (more_tests.py)')


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
            # Python before 3.11.4 has neither filters nor the argument
            archive.extraction_filter = getattr(tarfile, 'data_filter', None)
            archive.extractall(cache)
        relocate(cache)
        done.touch()
    about, here = json.loads((kit / ABOUT).read_text()), made_with()
    if about['triton_key'] != here['triton_key']:
        print(f"the kit is for another build of Triton ({about['triton']}) than {here['triton']}: all is compiled", flush=True)
    return {'TRITON_CACHE_DIR': str(cache), 'PYTHONPATH': str(site)}


def versions(environment: dict[str, str]) -> dict[str, str]:
    """Of the kit's packages, which this process does not see."""
    return {x.metadata['Name']: x.version for x in distributions(path=[environment['PYTHONPATH']])} if environment else {}


def relocate(cache: Path) -> None:
    """A kernel's list of files has their whole paths, and lists those that are not kept."""
    for path in cache.glob('*/__grp__*'):
        names = json.loads(path.read_text())['child_paths']
        kept = {name: str(path.parent / name) for name in names if (path.parent / name).exists()}
        path.write_text(json.dumps({'child_paths': kept}))


if __name__ == '__main__':
    # make gpu-kit
    pack(*map(Path, sys.argv[1:]))
