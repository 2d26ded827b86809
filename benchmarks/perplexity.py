"""`python -m benchmarks.perplexity`."""

from benchmarks.experiments.perplexity import main

if __name__ == '__main__':
    raise SystemExit(main())
