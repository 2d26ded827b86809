"""The operators as a package for the library `kernels`, which loads kernels from Hugging Face's hub or from a folder.

    python -m fla_longhorn.contrib.kernels build
    kernels.get_local_kernel(Path('build')).chunk_longhorn(q, k, v, beta)

The package is built from the sources of this one, imports only PyTorch, Triton and, if installed, Numba on a CPU, and can be
loaded beside fla_longhorn. It does not contain fla's kernels, so scalar step sizes run in Longhorn's own, nor the layer's loop
for a token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

VERSION = 1
BACKENDS = ('cpu', 'cuda')
ROOT = Path(__file__).parents[2]
OPS = ROOT / 'fla_longhorn/ops'
# call fla's kernels, and its convolution on the CPU
LEFT_OUT = ('triton/scalar_beta.py', 'numba/mixer.py', 'mixer.py')
SHARED = ROOT / 'fla_kit/numba'
# registers the Numba backend when it is imported
CPU = ROOT / 'fla_longhorn/cpu.py'
REGISTRATION = '\nfrom .cpu import register_numba\n\nregister_numba()\n'


def sources() -> dict[Path, str]:
    """Path in the package -> text of the file."""
    files = {path.relative_to(OPS): path for path in OPS.rglob('*.py')}
    files |= {path.relative_to(ROOT): path for path in SHARED.glob('*.py')}
    files[Path(CPU.name)] = CPU
    for name in LEFT_OUT:
        del files[Path(name)]
    texts = {path: relative(path, file.read_text(encoding='utf-8')) for path, file in sorted(files.items())}
    texts[Path('__init__.py')] += REGISTRATION
    return texts


def relative(path: Path, text: str) -> str:
    """Make the imports of a file relative, and remove those of the files that are left out."""
    modules = '|'.join(re.escape(name.removesuffix('.py').replace('/', '.')) for name in LEFT_OUT)
    left_out = rf'^from fla_longhorn\.ops\.(?:{modules}) import (\w+)(?: as \w+)?\n'
    for name in re.findall(left_out, text, re.MULTILINE):
        text = text.replace(f"'{name}', ", '')
    text = re.sub(left_out, '', text, flags=re.MULTILINE)
    dots = '.' * len(path.parts)
    return re.sub(r'^(\s*from )(?:fla_longhorn\.ops\.?|(?=fla_kit))', rf'\1{dots}', text, flags=re.MULTILINE)


def build(folder: Path) -> None:
    """Write the variants into `folder`."""
    files = sources()
    digest = hashlib.sha256(''.join(files.values()).encode()).hexdigest()[:7]
    for backend in BACKENDS:
        unique = f'_fla_longhorn_{backend}_{digest}'
        variant = folder / 'build' / f'torch-{backend}'
        for path, text in files.items():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            # names of operators are global in PyTorch
            text = re.sub(r"(?<=')fla_longhorn(?=::|')|(?<=torch\.ops\.)fla_longhorn\b", unique, text)
            (variant / path).write_text(text, encoding='utf-8')
        (variant / 'metadata.json').write_text(json.dumps({
            'name': 'fla-longhorn', 'id': unique, 'version': VERSION, 'license': 'MIT', 'python-depends': [],
            'backend': {'type': backend},
        }, indent=2), encoding='utf-8')


if __name__ == '__main__':
    parser = argparse.ArgumentParser(prog='python -m fla_longhorn.contrib.kernels', description=__doc__)
    parser.add_argument('folder', type=Path)
    build(parser.parse_args().folder)
