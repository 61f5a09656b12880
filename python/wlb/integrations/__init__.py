"""Plans from `wlb` in the terms of other engines: torch's own context parallelism, Megatron-Core, Hugging Face.

Each module needs its engine to be installed; import the one that you use. These modules translate plans of `wlb`.
"""
