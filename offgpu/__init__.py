"""What stands in for a GPU: knows Triton and torch, not Longhorn."""
