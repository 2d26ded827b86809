"""The one place that touches fla and transformers."""

from fla_longhorn.registry.entries import register, unregister

__all__ = ['register', 'unregister']
