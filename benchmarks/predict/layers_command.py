"""A training step and a decoded token of a whole layer, ours and fla's: all its kernels, predicted."""

from __future__ import annotations

from functools import partial

from benchmarks.predict import command

main = partial(command.main, module='benchmarks.predict.layers')
