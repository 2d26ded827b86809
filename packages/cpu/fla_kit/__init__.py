"""What the other packages are made with: loops compiled by Numba, and changes to other packages that can be reverted.

Knows neither fla nor Longhorn.
"""
