"""`python -m benchmarks.extrapolation`."""

from benchmarks.experiments.extrapolation import main

if __name__ == '__main__':
    raise SystemExit(main())
