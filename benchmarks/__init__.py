"""Measurements that need no GPU (compiled code) and, where there is one, its clock."""
