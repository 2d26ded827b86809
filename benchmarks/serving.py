"""`python -m benchmarks.serving`."""

from benchmarks.models.serving import main

if __name__ == '__main__':
    raise SystemExit(main())
