"""Fill Triton's cache for a GPU that is not here, with what `python -m benchmarks gpu` launches: `make gpu-kit`.

    python -m benchmarks.gpu.filling --cache FOLDER [--kit KIT] [--stages checks passes ...] [--workers 2]
    python -m benchmarks.gpu.filling --check KIT

The stages' calls run on tensors without memory, and each launch compiles as on a GPU, with all configurations of an autotuned
one, and makes its launcher. What the cache has is not compiled again. `--check` does the same with the kit's cache alone, and
counts what is compiled: 0.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from triton import knobs
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

from benchmarks.gpu import kit

TARGET = 'sm_90'
# but the tests, whose calls need values
STAGES = ('loops', 'passes', 'checks', 'steps', 'learning', 'tuning')
LAUNCHER = 'launcher'


def compile_share(stages: list[str], folder: str, claims: str | None) -> tuple[Counter[str], dict[str, str]]:
    """Compile into the cache `folder`: all, or with a folder `claims` what no other process has begun.

    Returns how many by name, and the errors of items.
    """
    from offgpu.absent_device import announced
    from offgpu.launches import make_driver

    counts: Counter[str] = Counter()
    errors: dict[str, str] = {}
    knobs.cache.dir = folder
    knobs.compilation.store_binary_only = True
    # before fla is imported, which asks for the device
    with announced(make_driver(TARGET, 'code')), launchers() as make_launcher:
        from benchmarks.operators import LonghornKernels
        from offgpu.calibration.calls import operator

        # fla's tiles by the memory of the device that is announced
        operator('gla', 'chunk_gla')

        def note(*, src, metadata: dict, cache_hit: bool, **_) -> None:
            counts[src.fn.__name__] += not cache_hit
            counts[LAUNCHER] += make_launcher(src, metadata)

        knobs.compilation.listener = note
        with only_compiling(claims and Path(claims)), LonghornKernels(), loss_without_memory():
            for stage in stages:
                module, started, before = importlib.import_module(f'benchmarks.gpu.{stage}'), time.time(), counts.total()
                for item in module.items('meta'):
                    try:
                        [*module.run(item, 'meta')]
                    # what fails here fails there: the rest is compiled
                    except Exception:
                        errors[f'{stage}: {item}'] = traceback.format_exc()
                print(f'{stage}: {counts.total() - before} compiled in {time.time() - started:.0f} s', flush=True)
    return +counts, errors


def compile_configurations(self: Autotuner, *args: Any, **kwargs: Any) -> None:
    """All among which an autotuner chooses; it times them when it launches one."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    for config in self.prune_configs(kwargs):
        # the errors that an autotuner passes over
        with suppress(OutOfResources, CompileTimeAssertionFailure, PTXASError):
            self.fn.run(*args, **kwargs, **config.all_kwargs())
        # what wraps the autotuner reads this attribute
        self.best_config = config


@contextmanager
def only_compiling(claims: Path | None) -> Iterator[None]:
    """Launches compile, unless another process has a file in `claims` for the kernel and its arguments."""
    run = JITFunction.run

    def is_claimed(*, key: str, fn: Any, **_: Any) -> bool:
        name = hashlib.sha256(f'{fn.module} {fn.name} {key}'.encode()).hexdigest()
        try:
            os.close(os.open(claims / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True
        return False

    def compile_one(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, 'run', compile_one))
        for kind in (Autotuner, *Autotuner.__subclasses__()):
            stack.enter_context(mock.patch.object(kind, 'run', compile_configurations))
        stack.enter_context(knobs.runtime.scope())
        knobs.runtime.jit_cache_hook = claims and is_claimed
        yield


def loss_without_memory() -> Any:
    """fla's loss on meta tensors too, which its module refuses."""
    from fla.modules.fused_cross_entropy import ops

    def forward(self: Any, input: Any, target: Any) -> Any:
        return ops.cross_entropy_loss(input, target, inplace_backward=self.inplace_backward)[0].sum()

    return mock.patch.object(ops.FusedCrossEntropyLoss, 'forward', forward)


@contextmanager
def launchers() -> Iterator[Callable[[object, dict], int]]:
    """A function that makes a kernel's launcher as the driver does, and returns whether it compiled one.

    It is linked to a `libcuda` without content, and not loaded.
    """
    from triton.backends.nvidia import driver
    from triton.runtime import build

    made, compile_c = [], build._build

    def count(*args) -> str:
        made.append(args)
        return compile_c(*args)

    def make_launcher(src: object, metadata: dict) -> int:
        made.clear()
        driver.CudaLauncher(src, SimpleNamespace(**metadata))
        return len(made)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, 'empty.c').touch()
        subprocess.run(
            ['gcc', '-shared', '-Wl,-soname,libcuda.so.1', '-o', f'{folder}/libcuda.so.1', f'{folder}/empty.c'], check=True,
        )
        stack.enter_context(mock.patch.object(driver, 'library_dirs', lambda: [folder]))
        stack.enter_context(mock.patch.object(build, '_build', count))
        stack.enter_context(mock.patch.object(build, '_load_module_from_path', lambda name, path: mock.MagicMock()))
        # the functions of the driver itself, once
        driver.CudaUtils.__init__(SimpleNamespace())
        yield make_launcher


def compile_all(stages: list[str], folder: Path, workers: int) -> tuple[Counter[str], dict[str, str]]:
    """`compile_share` in several processes, each compiling what the others have not begun."""
    with tempfile.TemporaryDirectory() as claims, ProcessPoolExecutor(workers, get_context('spawn')) as pool:
        shares = [pool.submit(compile_share, stages, str(folder), claims if workers > 1 else None) for _ in range(workers)]
        results = [share.result() for share in shares]
    return sum((counts for counts, _ in results), Counter[str]()), results[0][1]


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.gpu.filling', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--cache', type=Path, metavar='FOLDER', help='compile into this folder')
    parser.add_argument('--kit', type=Path, metavar='KIT', help='pack the cache and packages into this folder')
    parser.add_argument('--check', type=Path, metavar='KIT', help='count what is compiled with the cache of a kit')
    parser.add_argument('--stages', nargs='+', choices=STAGES, default=[*STAGES])
    parser.add_argument('--workers', type=int, default=2, help='processes that compile')
    options = parser.parse_args(args)
    folder = Path(kit.unpack(options.check)['TRITON_CACHE_DIR']) if options.check else options.cache.resolve()
    started = time.time()
    counts, errors = compile_all(options.stages, folder, 1 if options.check else options.workers)
    for name, error in errors.items():
        print(f'{name}: {error.strip().splitlines()[-1][:300]}')
    launchers_made = counts.pop(LAUNCHER, 0)
    print(f'{counts.total()} kernels and {launchers_made} launchers compiled in {time.time() - started:.0f} s')
    if options.check:
        print(json.dumps(counts))
        return int(bool(counts.total() + launchers_made))
    if options.kit:
        about = {'target': TARGET, 'stages': options.stages, 'kernels': len([*folder.glob('*/*.cubin')]), 'errors': errors}
        size = kit.pack(folder, options.kit, about)
        print(f'{options.kit}: {size / 2**20:.1f} MiB, {about["kernels"]} kernels')
    return 0


if __name__ == '__main__':
    sys.exit(main())
