"""A small byte-level Longhorn that learns to write from texts that are already installed. See `python -m examples.text -h`."""
