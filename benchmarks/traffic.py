"""`python -m benchmarks.traffic`."""

from benchmarks.kernels.traffic import main

if __name__ == '__main__':
    raise SystemExit(main())
