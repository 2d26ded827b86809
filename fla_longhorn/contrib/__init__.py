"""Longhorn in other programs, imported on request only."""
