"""TRL's own figures of a micro-batch, only of rows that have labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from wlb.torch.data import IGNORE

_FIGURES = ("entropy", "mean_token_accuracy")
"""Figures of TRL; its log has their means over micro-batches."""


@contextmanager
def learnt_alone(trainer: Any, inputs: Any, training: bool) -> Iterator[None]:
    """Inside this context, TRL's `SFTTrainer` computes its figures of a micro-batch.

    Ranks without a label add no means to what is gathered; counts are gathered from all. If no rank has a label,
    nothing is noted; TRL itself would note 0, or the entropy of padding. Ranks agree on this by one gather.
    """
    noted = getattr(trainer, "_metrics", None)
    if noted is None:
        yield
        return
    accelerator, own = trainer.accelerator, trainer.accelerator.gather_for_metrics
    labels = _labels(inputs).to(trainer.args.device)
    learning = accelerator.gather(labels).reshape(-1) > 0
    some = bool(learning.any())

    def gathered(value: Any, *args: Any, **kwargs: Any) -> Any:
        found = own(value, *args, **kwargs)
        mean = isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()
        if mean and isinstance(found, Tensor) and found.numel() == learning.numel() and some:
            return found.reshape(-1)[learning.to(found.device)]
        return found

    figures = noted["train" if training else "eval"]
    before = {name: len(figures[name]) for name in _FIGURES if name in figures}
    accelerator.gather_for_metrics = gathered
    try:
        yield
    finally:
        del accelerator.gather_for_metrics  # the class's own again
        if not some:
            for name in _FIGURES:
                if name in figures:
                    del figures[name][before.get(name, 0) :]
                    if not figures[name]:
                        del figures[name]


def _labels(inputs: Any) -> Tensor:
    """Number of labels of a row that count: int64 []. Stays on its device."""
    shifted = inputs.get("shift_labels")
    if shifted is None:
        labels = inputs.get("labels")
        shifted = None if labels is None else labels[..., 1:]
    return torch.zeros((), dtype=torch.int64) if shifted is None else (shifted != IGNORE).sum()
