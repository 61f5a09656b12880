"""What has to be read twice and is in Python alone.

The algorithms of the engine have their oracles in the core (`rust/wlb-core/tests/common`), and Python is held to what
these wrote down (`tests/golden`).
"""
