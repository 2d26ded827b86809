"""`python -m benchmarks.objectives`."""

from benchmarks.experiments.objectives import main

if __name__ == '__main__':
    raise SystemExit(main())
