"""Random states of Python, numpy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_states() -> Iterator[None]:
    """Puts the random states of Python, numpy and torch back afterwards."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # what users draw from
    kind = torch.accelerator.current_accelerator()
    try:
        with torch.random.fork_rng() if kind is None else torch.random.fork_rng(device_type=kind.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
