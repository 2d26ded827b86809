"""Every op on this machine's device against the float64 reference."""

from fla_longhorn.selfcheck.compare import CASES, DTYPES, OPS, main

__all__ = ['CASES', 'DTYPES', 'OPS', 'main']
