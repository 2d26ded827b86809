"""`python -m benchmarks.decoding`."""

from benchmarks.kernels.decoding import main

if __name__ == '__main__':
    raise SystemExit(main())
