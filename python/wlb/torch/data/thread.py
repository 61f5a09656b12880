"""A thread that works beside training."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import torch


def beside(name: str) -> ThreadPoolExecutor:
    """One thread, on the CUDA device of the one that makes it, if CUDA is in use.

    A thread begins with device 0, where pinned memory and what it makes would go from all ranks.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    use_device = None if device is None else functools.partial(torch.cuda.set_device, device)
    return ThreadPoolExecutor(1, name, use_device)
