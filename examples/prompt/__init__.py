"""A prompt read once, stored in a file and continued by many: `states.py`."""
