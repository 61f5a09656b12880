"""The trainer that studies, tests and `kills` share: every option of wlb, experts and tensor parallelism.

`examples/train.py` is the short one to read first. Run this one with ``torchrun -m studies.trainer.train``.
"""
