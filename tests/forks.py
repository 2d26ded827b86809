"""Python programs in processes of their own that need not import torch, transformers and fla again: nine seconds each.

A program is a child of Python's fork server, which has imported them and nothing of the plugin. What depends on what the
environment says when they are imported, or must find fla not imported yet, gets a plain interpreter. So does every program
beside a GPU: importing fla initialises CUDA, which a fork can't use.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from functools import cache
from multiprocessing import get_context
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[1]
PATHS = ROOT, *sorted(ROOT.glob('packages/*'))
SCRIPTS = ROOT / 'tests' / 'integration' / 'scripts'
PRELOADED = [
    'torch', 'torch._dynamo', 'torch._inductor.compile_fx', 'torch._inductor.config', 'transformers',
    'transformers.models.auto.modeling_auto', 'fla', 'fla.models', 'fla.layers', 'fla.ops',
]
HOME = tempfile.TemporaryDirectory(prefix='forks-')
# of the server and of each program: no network, a cache of its own, one thread
ENVIRONMENT = {
    'HF_HOME': HOME.name, 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(map(str, PATHS)),
    'TRITON_INTERPRET': '0',
}
CONTEXT = get_context('forkserver')
# seconds until a program is stopped
LIMIT = 600


def output(*arguments: object, **options) -> str:
    """What `python *arguments` prints; :func:`run` says which options there are."""
    done = run(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(
    *arguments: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None, fla: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Status and output of `python *arguments`; `env` is added to this process's environment; is fla imported already?"""
    words, environment = list(map(str, arguments)), {**os.environ, **ENVIRONMENT, **(env or {})}
    if not fla or torch.cuda.is_available():
        return subprocess.run(
            [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT,
        )
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ('output', 'errors')]
        process = CONTEXT.Process(target=execute, args=(words, str(cwd), environment, *map(str, files)))
        process.start()
        process.join(LIMIT)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        written = (path.read_text(encoding='utf-8', errors='replace') if path.exists() else '' for path in files)
        return subprocess.CompletedProcess(words, process.exitcode, *written)


@cache
def start_server() -> None:
    """Of this process, with the environment that what it imports shall see."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, ENVIRONMENT):
        ensure_running()


def execute(words: list[str], folder: str, environment: dict[str, str], output: str, errors: str) -> None:
    """In the child: what `python *words` runs, code, a module or a script."""
    os.setpgrp()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    added = [x for x in environment['PYTHONPATH'].split(os.pathsep) if x]
    sys.path[:] = [*added, *(x for x in sys.path if x not in added)]
    first, *others = words
    try:
        if first == '-c':
            sys.argv = ['-c', *others[1:]]
            sys.path.insert(0, '')
            sys.modules['__main__'] = types.ModuleType('__main__')
            exec(compile(others[0], '<string>', 'exec'), vars(sys.modules['__main__']))
        elif first == '-m':
            sys.argv = others
            sys.path.insert(0, folder)
            runpy.run_module(others[0], run_name='__main__', alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
            runpy.run_path(first, run_name='__main__')
    finally:
        atexit._run_exitfuncs()
