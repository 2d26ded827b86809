"""transformers' own common tests of causal language models, on Longhorn's: `python -m tests.suite [pytest's arguments]`.

They stand in the source distribution of transformers, which pip brings from the package index into `build/`; none of its files
is part of this repository. Needs pytest and `parameterized`. What the distribution lacks, the tests of `generate` and of
exporters, is left out: empty classes stand in for those.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / 'build' / 'suite'
STAND_INS = {
    'tests/__init__.py': '',
    'tests/exporters/__init__.py': '',
    'tests/exporters/test_export.py': 'class ExportTesterMixin:\n    pass\n',
    'tests/generation/__init__.py': '',
    'tests/generation/test_utils.py': 'class GenerationTesterMixin:\n    pass\n',
}


def prepare() -> Path:
    """The folder in which pytest runs: the distribution's tests, stand-ins and ours."""
    name = f'transformers-{version("transformers")}'
    folder, archive = FOLDER / name, FOLDER / f'{name}.tar.gz'
    if not archive.exists():
        subprocess.run(
            [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--no-binary', 'transformers', '--dest', FOLDER,
             name.replace('-', '==')], check=True,
        )
    with tarfile.open(archive) as files:
        own = [x for x in files.getmembers() if x.name.startswith(f'{name}/tests/')]
        files.extractall(FOLDER, own)
    for path, text in STAND_INS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    shutil.copy(Path(__file__).with_name('models.py'), folder / 'tests' / 'test_longhorn.py')
    (folder / 'pytest.ini').write_text('[pytest]\n')
    return folder


if __name__ == '__main__':
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1'}
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests/test_longhorn.py', *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=prepare(), env=env).returncode)
