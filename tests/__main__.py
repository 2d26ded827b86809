"""The tests as `make test` runs them, and at the end what ran where: `python -m tests [--slow] [pytest's options]`.

Each part is a run of pytest: the CPU; the operators once more in Triton's interpreter; where there is a GPU, what runs on it.
With `--slow` the tests of the packages and of the laboratory too.
A part that fails does not keep the next from running. The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]
PARTS = ['cpu', 'beside', 'packages', 'interpreter', 'device']
# those of timm, ONNX, TRL and the servers are not collected without what a target of the Makefile installs
OF_PACKAGES = (
    'packages/cpu/tests', 'packages/offgpu/tests/offgpu', 'packages/extras/tests', 'packages/serving/tests/test_known.py',
    'lab/tests',
)
# of the checkout as a whole: pages, targets, benchmarks, examples, the compiled kernels
BESIDE = (
    'packages/tests', 'packages/offgpu/tests/kernels', 'packages/offgpu/tests/ptx', 'benchmarks/tests', 'examples/tests',
)
# of these, what has tests for Triton's interpreter
INTERPRETED = ('packages/extras/tests/test_scalar_beta.py',)
INTERPRET = {'TRITON_INTERPRET': '1'}
# of the part on a GPU, which tests the most telling first and compiles its kernels on the way
SECONDS_ON_DEVICE = 900
# for the tests that have begun at the limit
GRACE = 120
ON_DEVICE = (
    'ops', 'layers', 'integration/test_packing.py', 'models/test_causal_lm.py', 'models/test_cache.py',
    'models/test_generation.py', 'models/test_capture.py', 'models', 'torch_compile', 'integration/test_attn_mode.py',
)


@dataclass(frozen=True)
class Part:
    """One run of pytest."""

    name: str
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    limit: float | None = None

    def run(self) -> tuple[bool, str]:
        """Whether nothing failed, and the counts in words."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / 'report.xml'
            command = [sys.executable, '-m', 'pytest', '-q', f'--junitxml={report}', *self.arguments]
            if self.limit:
                command += ['--seconds', str(self.limit)]
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | self.environment)
            try:
                status = process.wait(self.limit and self.limit + GRACE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                status = process.wait()
            stopped = f', stopped after {self.limit:.0f} s' if self.limit and status == 2 else ''
            if not report.exists():
                return False, f'pytest ended with status {status}{stopped}'
            suite = ElementTree.parse(report).getroot().find('testsuite')
        failed, skipped = int(suite.get('failures')) + int(suite.get('errors')), int(suite.get('skipped'))
        passed = int(suite.get('tests')) - failed - skipped
        # status 2 is an interrupted run
        green = passed > 0 and not failed and (status == 0 or bool(stopped))
        return green, f'{passed} passed, {failed} failed, {skipped} skipped, {float(suite.get("time")):.0f} s{stopped}'


def make_parts(names: list[str], chosen: list[str], device: str | None) -> list[Part]:
    """Those of `PARTS` that are asked for; `chosen` are pytest's options of all."""
    two = ['-n', '2', '--dist', 'loadgroup']
    parts = []
    if 'cpu' in names:
        parts.append(Part('CPU', ['tests', *chosen, *two, '--durations', '40']))
    if 'beside' in names:
        parts.append(Part('pages, benchmarks, examples and compiled kernels', [*BESIDE, *chosen, *two, '--durations', '20']))
    if 'packages' in names:
        parts.append(Part('packages and laboratory', [*OF_PACKAGES, *chosen, *two, '--durations', '20']))
        parts.append(Part("packages in Triton's interpreter", [*INTERPRETED, *chosen, *two], INTERPRET))
    if 'interpreter' in names:
        parts.append(Part("Triton's interpreter", ['tests/ops', *chosen, *two, '--durations', '20'], INTERPRET))
    if 'device' in names and device:
        workers = str(min(8, os.cpu_count() or 1))
        files = [f'tests/{name}' for name in ON_DEVICE]
        parts.append(Part(device, [
            *files, '--device', 'cuda', *chosen, '-n', workers, '--dist', 'worksteal', '--durations', '20',
        ], limit=SECONDS_ON_DEVICE))
    return parts


def find_device() -> tuple[str | None, str | None]:
    """The name of the GPU to test, and why there is none though the machine seems to have one."""
    if torch.cuda.is_available():
        if not any(map(shutil.which, ('cc', 'gcc', 'clang'))):
            return None, 'not tested: Triton compiles launchers with gcc or clang, and neither is on the PATH'
        return torch.cuda.get_device_name(), None
    return None, 'not tested: PyTorch sees none' if shutil.which('nvidia-smi') else None


def read_parts(arguments: list[str], device: str | None) -> list[Part]:
    """The parts that `python -m tests *arguments` runs."""
    parser = argparse.ArgumentParser(prog='python -m tests', description=__doc__.splitlines()[0])
    parser.add_argument('--parts', nargs='+', choices=PARTS, help='only these')
    parser.add_argument('--slow', action='store_true', help='the tests marked slow too')
    options, more = parser.parse_known_args(arguments)
    chosen = more if options.slow else ['-m', 'not slow', *more]
    return make_parts(options.parts or [x for x in PARTS if options.slow or x != 'packages'], chosen, device)


def main() -> int:
    # each worker computes with one thread
    os.environ['OMP_NUM_THREADS'] = '1'
    device, why_none = find_device()
    results = [(part.name, *part.run()) for part in read_parts(sys.argv[1:], device)]
    lines = [f'{name}: {counts}' for name, _, counts in results]
    if why_none:
        lines.append(f'GPU: {why_none}')
    print('\nWhat ran where', *lines, sep='\n', flush=True)
    return int(not all(green for _, green, _ in results))


if __name__ == '__main__':
    sys.exit(main())
