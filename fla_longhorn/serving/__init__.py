"""Longhorn in serving engines. Nothing here is imported with the package: an engine asks for it."""
