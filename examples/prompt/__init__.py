"""A prompt read once, stored in a file and continued by many. See `python -m examples.prompt -h`."""
