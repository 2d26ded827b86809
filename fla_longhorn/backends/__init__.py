"""What runs where there is no GPU: the Longhorn ops (Numba, PyTorch) and fla's fused modules."""

from fla_longhorn.backends.select import select_backend

__all__ = ['select_backend']
