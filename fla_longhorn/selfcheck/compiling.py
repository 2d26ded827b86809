"""`--compile-only`: compiles the kernels of a model into Triton's cache, by several processes.

Each process runs the same training step and decoding and launches nothing; a kernel that another one compiles is passed over.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from triton import knobs
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

import fla_longhorn
from fla_longhorn.selfcheck.case import DTYPES

# tokens of a prompt that is decoded without chunks
SHORT = 8


def add_model_options(parser: argparse._ActionsContainer) -> None:
    """The options that :func:`make_config` reads, and the sizes of a batch."""
    parser.add_argument('--config', metavar='PATH', help='a checkpoint or the folder of a config.json')
    for name, text in (('hidden_size', 'width'), ('state_size', 'entries per channel'), ('num_heads', 'groups of channels')):
        parser.add_argument(f'--{name}', type=int, help=f"{text}; the config's, which are the paper's without --config")
    parser.add_argument('--exact', action='store_true', default=None, help='the exact update')
    parser.add_argument('--batch_size', type=int, default=8, help='sequences of a batch, which say how a sequence is split')
    parser.add_argument('--seq_len', type=int, default=2048, help='tokens of a sequence, likewise')


def make_config(options: argparse.Namespace) -> PreTrainedConfig:
    """The model's, with as few layers as have all its kinds."""
    fla_longhorn.register()
    names = ('hidden_size', 'state_size', 'num_heads', 'exact')
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    make = partial(AutoConfig.from_pretrained, options.config) if options.config else partial(AutoConfig.for_model, 'longhorn')
    config = make(**chosen)
    kinds = getattr(config, 'layer_types', None) or [None]
    config.num_hidden_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
    return config


def run_model(options: argparse.Namespace) -> None:
    """A training step, then decoding after a long and a short prompt, of all rows and of one."""
    dtype, device = DTYPES[options.dtype[0] if options.dtype else 'bfloat16'], options.device
    config = make_config(options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if options.autocast else dtype)
    ids = torch.zeros(options.batch_size, options.seq_len, dtype=torch.int64, device=device)
    with torch.autocast(device.type, dtype) if options.autocast else nullcontext():
        model.train()(ids, labels=ids).loss.backward()
        model.eval().zero_grad()
        with torch.no_grad():
            for prompt in (ids, ids[:1], ids[:, :SHORT], ids[:1, :SHORT]):
                cache = model(prompt, use_cache=True).past_key_values
                model(prompt[:, :1], past_key_values=cache, use_cache=True)


@contextmanager
def compiled_kernels() -> Iterator[Counter[str]]:
    """Count compilations by the name of the kernel; what Triton's cache has is not compiled."""
    counts: Counter[str] = Counter()

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            counts[src.fn.__name__] += 1

    with knobs.compilation.scope():
        knobs.compilation.listener = note
        yield counts


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


def compile_share(claims: Path, run: Callable[[], None]) -> Counter[str]:
    """What one process does: `run`, of which it compiles the kernels that no other has begun."""
    with only_compiling(claims), compiled_kernels() as counts:
        run()
    return counts


def compile_model(options: argparse.Namespace) -> int:
    """Compile, then run the model once, which autotunes and shows that nothing is left to compile; print both counts."""
    run, started = partial(run_model, options), time.perf_counter()
    with tempfile.TemporaryDirectory() as claims, ProcessPoolExecutor(options.workers, get_context('spawn')) as pool:
        shares = [pool.submit(compile_share, Path(claims), run) for _ in range(options.workers)]
        total = sum((share.result() for share in shares), Counter[str]())
    for name, count in sorted(total.items()):
        print(f'{name:48}{count:4}')
    print(f'compiled {total.total()} kernels in {time.perf_counter() - started:.0f} s, {options.workers} processes; '
          f'Triton\'s cache: {knobs.cache.dir}')
    with compiled_kernels() as left:
        run()
    print(f'a training step and decoding: {left.total()} more')
    return 0
