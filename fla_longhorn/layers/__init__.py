"""Longhorn's layer."""

from fla_longhorn.layers.longhorn import Longhorn

__all__ = ['Longhorn']
