"""A small byte-level Longhorn that learns to write from texts of this environment. See `python -m examples.text -h`."""
