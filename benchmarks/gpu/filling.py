"""A GPU that is not here: calls on tensors without memory fill Triton's cache, as `python -m benchmarks gpu --device meta`.

Each launch compiles as on a GPU, with all configurations of an autotuned one, and makes its launcher. What the cache has is
not compiled again.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver as active
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

from offgpu.absent_device import announced
from offgpu.launches import make_driver

TARGET = 'sm_90'


@contextmanager
def absent_gpu() -> Iterator[Callable[[object, dict], None]]:
    """Calls on tensors without memory compile; yields the function that makes a kernel's launcher."""
    knobs.compilation.store_binary_only = True
    # before fla is imported, which asks for the device
    with announced(make_driver(TARGET, 'code')), launchers() as make_launcher:
        from benchmarks.operators import LonghornKernels
        from offgpu.calibration.calls import operator

        # fla's tiles by the memory of the device that is announced
        operator('gla', 'chunk_gla')
        with only_compiling(), LonghornKernels(), loss_without_memory():
            yield make_launcher


@contextmanager
def standing_for_gpu() -> Iterator[None]:
    """Calls on the CPU's tensors compile what they would launch on a GPU, and comparisons pass."""
    from fla_longhorn.ops import backends

    with (
        _disable_current_modes(), mock.patch('tests.ops.cases.TRITON_DEVICE', 'cpu'), mock.patch('torch.testing.assert_close'),
        mock.patch.object(backends, 'loops', None),
        mock.patch.object(backends, 'backend_name', cache(lambda *_: 'triton')),
    ):
        yield


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
def only_compiling() -> Iterator[None]:
    """Launches compile their kernels, and nothing else."""
    run = JITFunction.run

    def compile_one(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, 'run', compile_one))
        for kind in (Autotuner, *Autotuner.__subclasses__()):
            stack.enter_context(mock.patch.object(kind, 'run', compile_configurations))
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
        # the functions of the driver itself, once; from Triton 3.7 on, they launch all kernels
        functions = SimpleNamespace()
        driver.CudaUtils.__init__(functions)
        vars(active.active.utils).update({x: f for x, f in vars(functions).items() if not hasattr(active.active.utils, x)})
        yield lambda src, metadata: driver.CudaLauncher(src, SimpleNamespace(**metadata))
