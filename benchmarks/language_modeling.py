"""`python -m benchmarks.language_modeling`."""

from benchmarks.experiments.language_modeling import main

if __name__ == '__main__':
    raise SystemExit(main())
