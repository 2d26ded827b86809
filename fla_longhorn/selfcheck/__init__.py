"""`python -m fla_longhorn.selfcheck`: compares every op on this machine's device with the float64 reference."""

from fla_longhorn.selfcheck.case import CASES, DTYPES, OPS
from fla_longhorn.selfcheck.command import main

__all__ = ['CASES', 'DTYPES', 'OPS', 'main']
