"""Speed side by side, and counts that need no GPU; `python -m benchmarks NAME`."""
