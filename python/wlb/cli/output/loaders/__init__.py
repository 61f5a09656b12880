"""Loaders that `wlb tune` prints for pasting: each file has the functions as they are printed, and tests run them.

What they use and do not define, the configuration defines above them.
"""
