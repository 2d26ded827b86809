"""`python -m benchmarks.plain`."""

from benchmarks.experiments.plain import main

if __name__ == '__main__':
    raise SystemExit(main())
