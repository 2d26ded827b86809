"""Longhorn in other programs. Nothing here is imported with the package: the program asks for its part."""
