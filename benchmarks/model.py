"""`python -m benchmarks.model`."""

from benchmarks.models.run import main

if __name__ == '__main__':
    raise SystemExit(main())
