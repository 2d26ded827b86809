"""Compile the pretend device for the torch of this Python: `python -m offgpu.pretend.build`.

The library goes to `build/pretend/` of the checkout or to PRETEND_BUILD, one file per version of torch and of the sources.
Needs g++.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / 'csrc'
FOLDER = Path(os.environ.get('PRETEND_BUILD', Path(__file__).parents[2] / 'build' / 'pretend'))

HEADER = """#include <string>
#include <unordered_set>
static const std::unordered_set<std::string> NO_DEVICE_CHECK = {{
{names}}};
"""


def torch_folder() -> Path:
    """torch's folder, without importing it: the device must be loaded before torch."""
    spec = importlib.util.find_spec('torch')
    if spec is None or spec.origin is None:
        raise SystemExit('torch is not installed')
    folder = Path(spec.origin).parent
    if (folder / 'lib' / 'libtorch_cuda.so').exists():
        raise SystemExit('the pretend device takes the place of CUDA, so it needs a CPU build of torch')
    return folder


def library() -> Path:
    """The path of the library for this torch and these sources."""
    digest = hashlib.sha256((torch_folder() / 'version.py').read_bytes())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return FOLDER / f'libpretend-{digest.hexdigest()[:16]}.so'


def operators_without_device_check(torch: Path) -> list[str]:
    """Operators that take 0-dim CPU tensors with tensors of the device."""
    text = (torch.parent / 'torchgen' / 'packaged' / 'ATen' / 'native' / 'native_functions.yaml').read_text()
    named = ((re.match(r'- func: ([\w.]+)\(', block), block) for block in re.split(r'\n(?=- func: )', text))
    return [f'aten::{name[1]}' for name, block in named if name and 'device_check: NoCheck' in block]


def build() -> Path:
    """Compile, if the library does not exist."""
    made = library()
    if made.exists():
        return made
    compiler = shutil.which('g++')
    if compiler is None:
        raise SystemExit('the pretend device is compiled by g++, which is not installed')
    torch = torch_folder()
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        names = ',\n'.join(f'  "{name}"' for name in operators_without_device_check(torch))
        (Path(folder) / 'no_device_check.h').write_text(HEADER.format(names=names))
        output = Path(folder) / made.name
        done = subprocess.run([
            compiler, '-std=c++20', '-O1', '-fPIC', '-shared', '-w', f'-I{torch}/include',
            f'-I{torch}/include/torch/csrc/api/include', f'-I{folder}', str(SOURCES / 'operators.cpp'),
            '-o', str(output), f'-L{torch}/lib', '-ltorch_cpu', '-lc10', f'-Wl,-rpath,{torch}/lib',
        ], check=False)
        if done.returncode:
            raise SystemExit(f'g++ failed with status {done.returncode}')
        output.rename(made)
    return made


if __name__ == '__main__':
    print(build())
