"""All changes that importing the package makes in fla and transformers, in parts that can be reverted."""

from fla_longhorn.patches.apply import DEFAULT, VARIABLE, patch, register, unregister
from fla_longhorn.patches.parts import PARTS

__all__ = ['DEFAULT', 'PARTS', 'VARIABLE', 'patch', 'register', 'unregister']
