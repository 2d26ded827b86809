"""`python -m fla_longhorn.selfcheck`: every op on this machine's device against the float64 reference.

A case is run as its user would run it. The exit status is 1 where anything is off.
"""

from fla_longhorn.selfcheck.cases import CASES, DTYPES, OPS
from fla_longhorn.selfcheck.command import main

__all__ = ['CASES', 'DTYPES', 'OPS', 'main']
