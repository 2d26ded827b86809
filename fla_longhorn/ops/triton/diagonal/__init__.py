"""The diagonal update (arXiv 2407.14207, Eq. 7) in Triton."""
