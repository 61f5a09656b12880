"""Counts the steps of a run that have a label: other steps are not trained, so schedules must not count them."""

from __future__ import annotations

from collections.abc import Callable

from wlb.reading.reader import StepReader
from wlb.torch.data import BalancedBatchSampler, Documents, PackedBatch

Collate = Callable[..., PackedBatch]


def steps_with_labels_left(
    sampler: BalancedBatchSampler, documents: Documents, collate_fn: Collate, num_epochs: int
) -> list[int]:
    """Numbers of steps that `with_labels.steps_with_labels` will yield from a sampler's position on.

    Args:
        sampler: of any rank; its position stays as it is.
        documents: what it chooses from.
        collate_fn: makes a micro-batch of documents, with the labels that count.
        num_epochs: number of epochs of the run.

    Returns:
        One number for each epoch from the sampler's present one to the last, or an empty list after the last. All ranks
        get the same, without communication.

    Complexity:
        Plans all these steps, some milliseconds each, and reads the documents of each up to the first with a label.
    """
    reader = sampler.reader.copy()
    found: list[int] = []
    while reader.epoch < num_epochs:
        found.append(0)
        while not reader.ended:
            found[-1] += _has_labels(reader, sampler, documents, collate_fn)
        reader.next_epoch()
    return found


def _has_labels(reader: StepReader, sampler: BalancedBatchSampler, documents: Documents, collate_fn: Collate) -> bool:
    """Whether the next step has a label that counts. The reader is then behind that step."""
    packing = reader.next_step()
    if not any((micro_batch.lengths > 1).any() for micro_batch in packing):
        return False
    elements = (element for micro_batch in packing for element in reader.elements(micro_batch))
    return any(collate_fn([documents[element]]).num_valid_tokens for element in elements)
