"""Finds tensors that wlb reads while a trainer trains: on a GPU the host would wait there for the device."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import wlb

READING = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
WLB, TORCH = (str(Path(module.__file__ or "").parent) + "/" for module in (wlb, torch))

# Where tensors are of the host on every machine: documents that are read, and a step's labels, which ranks add up on
# the host (`wlb.torch.host.host_group`). Proofs, new groups and sums of an evaluation are read once.
ON_HOST = (
    "integrations/rows.py",
    "torch/data/",
    "torch/proof/",
    "integrations/huggingface/proof.py",
    "integrations/lightning_proof.py",
    "torch/host.py",
    "integrations/megatron/sharing.py:header",
    "integrations/megatron/rows.py:mean_loss",  # which the loop calls for a figure
    "torch/loss.py:count_valid_tokens",
    "integrations/huggingface/balance.py:_wlb_of_all_ranks",
    "integrations/huggingface/balance.py:_sums",
    "integrations/huggingface/balance.py:evaluation_loop",
)


def _reader(frame: FrameType | None) -> str | None:
    """Function of wlb that reads, as file:function; None if somebody else does."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(WLB):
        return None
    return f"{frame.f_code.co_filename[len(WLB) :]}:{frame.f_code.co_name}"


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Counts what wlb reads of tensors that may be on a device, by place, in this thread."""
    found: Counter[str] = Counter()
    thread = threading.get_ident()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            place = _reader(sys._getframe(1)) if threading.get_ident() == thread else None
            if place is not None and not place.startswith(ON_HOST):
                found[place] += 1
            return real(tensor, *args, **kwargs)

        return read

    with mock.patch.multiple(Tensor, **{name: counted(getattr(Tensor, name)) for name in READING}):
        yield found
