"""Fill Triton's cache for a GPU that is not here, with what `python -m benchmarks gpu` launches: `make gpu-kit`.

    python -m benchmarks.gpu.filling --cache FOLDER [--kit KIT] [--stages checks passes ...] [--workers 2] [--peers]

The stages' calls run on tensors without memory, and each launch compiles as on a GPU, with all configurations of an autotuned
one, and makes its launcher. What the cache has is not compiled again; the kit gets what this call used. `--peers` leaves
Longhorn's kernels to a later call. `python -m benchmarks gpu --device meta --kit KIT` does the same in the processes of a run
and with the kit's cache alone: the page counts what is compiled, 0.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import subprocess
import tempfile
import time
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
from triton.runtime.cache import get_cache_manager
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

from benchmarks.gpu import kit
from benchmarks.gpu.work import LAUNCHER, compilations, outcome

TARGET = 'sm_90'
# but the tests, whose calls need values
STAGES = ('loops', 'steps', 'learning', 'passes', 'checks', 'tuning')
# how many were compiled by name, the folders of those that were used, and errors of items
Compiled = tuple[Counter[str], set[str], dict[str, str]]


def compile_share(stages: list[str], folder: str, claims: str, peers: bool) -> Compiled:
    """Compile into the cache `folder` what no other process has begun, which a file in `claims` tells."""
    counts: Counter[str] = Counter()
    used: set[str] = set()
    errors: dict[str, str] = {}
    knobs.cache.dir = folder
    knobs.compilation.store_binary_only = True
    with absent_gpu(Path(claims), peers) as make_launcher:
        def launched(src: object, metadata: dict) -> None:
            used.add(Path(get_cache_manager(metadata['hash']).cache_dir).name)
            make_launcher(src, metadata)

        compiled = compilations(launched)
        for stage in stages:
            module, started, before = importlib.import_module(f'benchmarks.gpu.{stage}'), time.time(), counts.total()
            for item in module.items('meta'):
                record = outcome(module, item, 'meta', compiled)
                counts.update(record['compiled'])
                # what fails here fails there: the rest is compiled
                if error := record.get('error'):
                    errors[f'{stage}: {item}'] = error
            print(f'{stage}: {counts.total() - before} compiled in {time.time() - started:.0f} s', flush=True)
    return counts, used, errors


@contextmanager
def absent_gpu(claims: Path | None = None, peers: bool = False) -> Iterator[Callable[[object, dict], None]]:
    """Calls on tensors without memory compile, as `only_compiling`; yields the function that makes a kernel's launcher."""
    from offgpu.absent_device import announced
    from offgpu.launches import make_driver

    # before fla is imported, which asks for the device
    with announced(make_driver(TARGET, 'code')), launchers() as make_launcher:
        from benchmarks.operators import LonghornKernels
        from offgpu.calibration.calls import operator

        # fla's tiles by the memory of the device that is announced
        operator('gla', 'chunk_gla')
        with only_compiling(claims, peers), LonghornKernels(), loss_without_memory():
            yield make_launcher


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
def only_compiling(claims: Path | None = None, peers: bool = False) -> Iterator[None]:
    """Launches compile, unless there is a file in `claims` for the kernel and its arguments; with `peers`, not Longhorn's."""
    run = JITFunction.run

    def is_claimed(*, key: str, fn: Any, **_: Any) -> bool:
        if peers and fn.module.startswith('fla_longhorn'):
            return True
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
        knobs.runtime.jit_cache_hook = is_claimed if claims else None
        yield


def loss_without_memory() -> Any:
    """fla's loss on meta tensors too, which its module refuses."""
    from fla.modules.fused_cross_entropy import ops

    def forward(self: Any, input: Any, target: Any) -> Any:
        return ops.cross_entropy_loss(input, target, inplace_backward=self.inplace_backward)[0].sum()

    return mock.patch.object(ops.FusedCrossEntropyLoss, 'forward', forward)


@contextmanager
def launchers() -> Iterator[Callable[[object, dict], None]]:
    """A function that makes a kernel's launcher as the driver does, linked to a `libcuda` without content, and not loaded."""
    from triton.backends.nvidia import driver
    from triton.runtime import build

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        Path(folder, 'empty.c').touch()
        subprocess.run(
            ['gcc', '-shared', '-Wl,-soname,libcuda.so.1', '-o', f'{folder}/libcuda.so.1', f'{folder}/empty.c'], check=True,
        )
        stack.enter_context(mock.patch.object(driver, 'library_dirs', lambda: [folder]))
        stack.enter_context(mock.patch.object(build, '_load_module_from_path', lambda name, path: mock.MagicMock()))
        # the functions of the driver itself, once
        driver.CudaUtils.__init__(SimpleNamespace())
        yield lambda src, metadata: driver.CudaLauncher(src, SimpleNamespace(**metadata))


def compile_all(stages: list[str], folder: Path, workers: int, peers: bool) -> Compiled:
    """`compile_share` in several processes."""
    with tempfile.TemporaryDirectory() as claims, ProcessPoolExecutor(workers, get_context('spawn')) as pool:
        shares = [pool.submit(compile_share, stages, str(folder), claims, peers) for _ in range(workers)]
        results = [share.result() for share in shares]
    counts, used, errors = zip(*results, strict=True)
    return sum(counts, Counter[str]()), set[str]().union(*used), errors[0]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.gpu.filling', description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--cache', type=Path, metavar='FOLDER', required=True, help='compile into this folder')
    parser.add_argument('--kit', type=Path, metavar='KIT', help='pack the cache and packages into this folder')
    parser.add_argument('--stages', nargs='+', choices=STAGES, default=[*STAGES])
    parser.add_argument('--peers', action='store_true', help="all but Longhorn's kernels")
    parser.add_argument('--workers', type=int, default=2, help='processes that compile')
    options = parser.parse_args(args)
    folder, started = options.cache.resolve(), time.time()
    counts, used, errors = compile_all(options.stages, folder, options.workers, options.peers)
    for name, error in errors.items():
        print(f'{name}: {error.strip().splitlines()[-1][:300]}')
    launchers_made = counts.pop(LAUNCHER, 0)
    print(f'{counts.total()} kernels and {launchers_made} launchers compiled in {time.time() - started:.0f} s')
    if options.kit:
        about = {'target': TARGET, 'stages': options.stages, 'kernels': len(used), 'errors': errors}
        size = kit.pack(folder, used, options.kit, about)
        print(f'{options.kit}: {size / 2**20:.1f} MiB, {len(used)} kernels')


if __name__ == '__main__':
    main()
