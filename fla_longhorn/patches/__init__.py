"""What importing the package changes in fla and transformers: the one place that does, by parts, each reverted exactly."""

from fla_longhorn.patches.apply import DEFAULT, VARIABLE, patch, register, unregister
from fla_longhorn.patches.parts import PARTS

__all__ = ['DEFAULT', 'PARTS', 'VARIABLE', 'patch', 'register', 'unregister']
