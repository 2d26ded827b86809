"""What a mutation is: one wrong edit of the package, and the tests that must notice it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Triton's kernels on the CPU; fixed when a process imports Triton
INTERPRET = {'TRITON_INTERPRET': '1'}
# PyTorch's loops instead of Numba's, which take seconds to compile
TORCH = {'FLA_LONGHORN_BACKEND': 'torch', 'FLA_CPU_LOOPS': '0'}


@dataclass(frozen=True)
class Mutation:
    """One wrong edit."""

    # unique within its room
    name: str
    # in `fla_longhorn/` where it is not `packages/...`
    file: str
    # text that the file holds once, and what replaces it
    old: str
    new: str
    # a sentence that says what goes wrong
    breaks: str
    # node ids of the tests that must fail, without parameters, separated by spaces
    tests: str
    # words that the names of their cases hold, as pytest's `-k` takes them; none takes all
    where: str = ''
    # variables of the environment in which the tests run
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.file if self.file.startswith('packages/') else f'fla_longhorn/{self.file}'

    def apply(self, text: str) -> str:
        """The file's text with the mutation in it."""
        if text.count(self.old) != 1:
            raise ValueError(f'{self.path} must hold {self.old!r} once, got {text.count(self.old)} times')
        return text.replace(self.old, self.new)

    @property
    def selection(self) -> tuple[str, ...]:
        """The cases, as pytest's arguments."""
        return *self.tests.split(), '-k', ' and '.join(self.where.split())
