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
    """One wrong edit.

    Args:
        name (str):
            Its name within its room.
        file (str):
            The file, in `fla_longhorn/` where it is not `fla_cpu/...`.
        old (str):
            Text that the file holds once.
        new (str):
            What replaces it.
        breaks (str):
            What it breaks, as a sentence.
        tests (str):
            Node ids of the tests that must fail, without parameters, separated by spaces.
        where (str, Optional):
            Words that the names of the cases hold, as pytest's `-k` takes them. Default: none, which takes all cases.
        env (Mapping, Optional):
            Environment of the tests.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str
    where: str = ''
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.file if self.file.startswith('fla_cpu/') else f'fla_longhorn/{self.file}'

    def apply(self, text: str) -> str:
        """The file's text with the mutation in it."""
        if text.count(self.old) != 1:
            raise ValueError(f'{self.path} must hold {self.old!r} once, got {text.count(self.old)} times')
        return text.replace(self.old, self.new)

    @property
    def selection(self) -> tuple[str, ...]:
        """The cases, as pytest's arguments."""
        return *self.tests.split(), '-k', ' and '.join(self.where.split())
