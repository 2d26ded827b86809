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
            Text of the file that is replaced.
        new (str):
            What stands in its place.
        breaks (str):
            What it breaks, as a sentence.
        tests (str):
            Node ids of the tests that must fail, without parameters, separated by spaces.
        where (str, Optional):
            Words, separated by spaces, that the ids of the cases hold. Default: none, which takes all cases.
        count (int, Optional):
            How often `old` stands in the file; each is replaced. Default: 1.
        env (Mapping, Optional):
            Environment of the tests.
        collects (bool, Optional):
            Whether pytest can still import the tests. Where it can't, that is what kills the mutation. Default: `True`.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str
    where: str = ''
    count: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    collects: bool = True

    @property
    def path(self) -> str:
        return self.file if self.file.startswith('fla_cpu/') else f'fla_longhorn/{self.file}'

    def apply(self, text: str) -> str:
        """The file's text with the mutation in it.

        Raises:
            ValueError: `old` does not stand in it `count` times, or nothing changes.
        """
        found = text.count(self.old)
        if found != self.count:
            raise ValueError(f'{self.path} must hold {self.old!r} {self.count} times, got {found}')
        if self.new == self.old:
            raise ValueError(f'new must differ from old, got {self.new!r} twice')
        return text.replace(self.old, self.new)

    def select(self, collected: list[str]) -> list[str]:
        """Its cases among collected node ids; empty where one of its tests has none."""
        cases = [
            [x for x in collected if x.partition('[')[0] == test and all(word in x[len(test):] for word in self.where.split())]
            for test in self.tests.split()
        ]
        return [x for some in cases for x in some] if all(cases) else []
