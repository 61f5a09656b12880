"""Plans from `wlb` in the terms of other engines: torch's own context parallelism, Megatron-Core, Hugging Face.

Each module needs its engine installed; import the one you use. Nothing here plans: these are translations.
"""
