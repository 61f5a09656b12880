"""Steps with something to learn, the same ones on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

import wlb
from wlb._errors import error
from wlb._warned import warn
from wlb.torch.data import BalancedStream, PackedBatch, Step, StepLoader
from wlb.torch.host import host_group
from wlb.torch.loss import count_valid_tokens


def steps_with_labels(
    loader: StepLoader[Any] | BalancedStream[Any], *, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[Step[Any], int | None]]:
    """The steps of the rest of the epoch that have labels; if it has none left, those of the next epoch.

    A trainer would take an empty epoch for the end of all data. Ends without a step after the end of a stream or of the
    last epoch. Yields with each step its number of labels that count on all ranks, or None if that cannot be known.

    Steps in which all documents wait, or in which no token has a next one to predict, are left out, because a division
    by their 0 labels would make every weight NaN. If the reason is that all labels on all ranks are masked, it warns.
    Ranks agree on this by an all-reduce in each step over `group`, the ranks that share it; None for all ranks. It runs
    on the host, so that no rank waits for its device. In the first step the ranks of `group` make theirs.

    Raises:
        wlb.WlbError: in two epochs, all documents that did not wait had only one token or only masked labels.
    """
    given, barren, empty = False, 0, 0
    while not given and empty < 2:  # an epoch may have no further step, but not also the next one
        if barren > 1:
            raise error("steps", "have documents of one token or without labels only: there is nothing to predict")
        trained, any_step = False, False
        for step in loader:
            any_step = True
            trained |= any(map(len, step.packing))
            labels = _labels(step, group)
            if labels != 0:
                given = True
                yield step, labels
        if not any_step and isinstance(loader, StepLoader) and loader.ended:
            return  # the state stands after the last step
        barren, empty = barren + trained, 0 if any_step else empty + 1


def _labels(step: Step[Any], group: dist.ProcessGroup | None) -> int | None:
    """Labels of the step that count on all ranks; all get the same answer."""
    packing = step.packing
    if isinstance(packing, wlb.Packing) and not any((micro_batch.lengths > 1).any() for micro_batch in packing):
        return 0
    if not all(map(_has_labels, step.micro_batches)):  # only the collator of each rank knows them
        return None
    if step.num_ranks > 1 and not dist.is_initialized():  # one rank's part, read without the other ranks
        return None
    if step.num_ranks > 1:
        group = host_group(group, description="wlb: labels of steps")
    labels = count_valid_tokens(step, group=group)
    if not labels:
        warn(f"step {step.number} has no label that counts on any rank: it is skipped")
    return labels


def _has_labels(batch: Any) -> bool:
    return isinstance(batch, PackedBatch) or (isinstance(batch, Mapping) and batch.get("labels") is not None)
