"""Python programs as processes of their own that need not import torch, transformers and fla again.

Each is forked from a process that has imported them, or all but fla, and nothing of the plugin. What depends on what the
environment says when they are imported needs an interpreter of its own. So does every program beside a GPU: importing fla
initialises CUDA, which a fork can't use.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
WITHOUT_FLA = (
    'torch', 'torch._dynamo', 'torch._inductor.compile_fx', 'torch._inductor.config', 'transformers',
    'transformers.models.auto.modeling_auto',
)
PRELOADED = (*WITHOUT_FLA, 'fla', 'fla.models', 'fla.layers', 'fla.ops')


class Forks:
    """`run` is `subprocess.run` of `python *arguments`, in children of a process that imported `preloaded` once."""

    def __init__(self, preloaded: tuple[str, ...], env: Mapping[str, str], folder: Path) -> None:
        self.files = tempfile.TemporaryDirectory(prefix='forks-')
        # where huggingface_hub keeps what it makes is asked for when it is imported
        env = {'HF_HOME': f'{self.files.name}/hf', 'HF_HUB_OFFLINE': '1', **env}
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / 'server.py'), *preloaded], env={**os.environ, **env}, cwd=folder,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )

    def run(
        self, arguments: tuple[str, ...], folder: Path, env: Mapping[str, str], limit: float = 600,
    ) -> subprocess.CompletedProcess[str]:
        """Exit status, -1 where it took longer than `limit` seconds, and what it wrote."""
        assert self.server.stdin is not None and self.server.stdout is not None
        output, errors = (Path(self.files.name) / name for name in ('output', 'errors'))
        request = {
            'arguments': arguments, 'folder': str(folder), 'env': dict(env), 'output': str(output), 'errors': str(errors),
            'limit': limit,
        }
        self.server.stdin.write(json.dumps(request) + '\n')
        self.server.stdin.flush()
        answer = self.server.stdout.readline()
        if not answer:
            raise RuntimeError(f'the process that forks programs ended with code {self.server.wait()}')
        written = (path.read_text(encoding='utf-8', errors='replace') for path in (output, errors))
        return subprocess.CompletedProcess(arguments, json.loads(answer), *written)

    def close(self) -> None:
        self.server.communicate()
        self.files.cleanup()


@functools.cache
def forks(fla: bool) -> Forks:
    """Of this process, with fla or without; programs have one thread and compile kernels instead of interpreting them."""
    env = {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'TRITON_INTERPRET': '0'}
    forks = Forks(PRELOADED if fla else WITHOUT_FLA, env, ROOT)
    atexit.register(forks.close)
    return forks


def run(
    *arguments: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None, fla: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Status and output of `python *arguments`; `env` is added to this process's environment; is fla imported already?"""
    named = {'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'TRITON_INTERPRET': '0'}
    command, env = tuple(map(str, arguments)), {**os.environ, **named, **(env or {})}
    if torch.cuda.is_available():
        return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    return forks(fla).run(command, cwd, env)
