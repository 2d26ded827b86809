"""`python -m benchmarks.mqar`."""

from benchmarks.experiments.mqar import main

if __name__ == '__main__':
    raise SystemExit(main())
