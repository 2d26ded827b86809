"""Tools to check and time Triton kernels without a GPU: know Triton and torch, not Longhorn."""
