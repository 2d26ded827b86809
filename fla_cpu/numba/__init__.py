"""Loops compiled by Numba: vectors, memory, threads. Nothing here is imported where Numba is not installed."""
