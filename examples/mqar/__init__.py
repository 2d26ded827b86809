"""The demo: a small Longhorn language model learns multi-query associative recall. See `python -m examples.mqar -h`."""
