"""Naive oracles, one for each room of the engine.

Each is a second, independent reading of docs/semantics.md in plain Python: slow, obvious, and equal to wlb bit for bit
(costs from tables and latencies: up to rounding). Nothing of wlb is used to compute one.
"""
