"""A loss that does not depend on how documents were packed: every token of the global batch counts the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb._errors import check_integer, error
from wlb.torch.data.batch import IGNORE


def token_normalized_loss(
    logits: Tensor, labels: Tensor, *, num_valid_tokens: int | Tensor, ignore_index: int = IGNORE
) -> Tensor:
    """This rank's part of the mean cross-entropy over the whole global batch.

    The sum over all micro-batches, CP ranks and DP ranks is the mean: add gradients up, do not average them
    (:func:`~wlb.torch.gradients.sum_gradients`). A mean for each micro-batch, then over micro-batches, would weigh
    tokens of short micro-batches more.

    Args:
        logits: float[tokens, vocabulary]; may have 0 tokens. Computed in fp32.
        labels: int64[tokens], `ignore_index` where there is nothing to predict.
        num_valid_tokens: labels that count in the whole global batch (:func:`count_valid_tokens`). 0 if it has none:
            then the loss and its gradients are 0, so that a rank may run such a batch with the others, and the
            optimizer is not to step. A tensor is not looked at, for that would wait for the device.
        ignore_index: as in :func:`torch.nn.functional.cross_entropy`.

    Returns:
        A scalar, float32.

    Raises:
        WlbError: for shapes that do not fit, an int below 0, or 0 where a label counts.
    """
    if logits.ndim != 2:
        raise error(
            "logits", f"has shape {tuple(logits.shape)}: must be [tokens, vocabulary]", value=tuple(logits.shape)
        )
    if labels.shape != logits.shape[:1]:
        shape = tuple(labels.shape)
        raise error("labels", f"has shape {shape}: must be [{logits.shape[0]}], the tokens of logits", value=shape)
    if not isinstance(num_valid_tokens, Tensor):
        check_integer("num_valid_tokens", num_valid_tokens, minimum=0)
        if num_valid_tokens == 0 and bool((labels != ignore_index).any()):
            message = f"= 0, but labels other than ignore_index = {ignore_index} are here: count them over all ranks"
            raise error("num_valid_tokens", message, value=num_valid_tokens)
    total = F.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="sum")
    # Without labels the sum is 0, whatever it is divided by, but 0 / 0 is not.
    at_least_1 = num_valid_tokens.clamp(min=1) if isinstance(num_valid_tokens, Tensor) else max(num_valid_tokens, 1)
    return total / at_least_1


def count_valid_tokens(
    counts: int | Iterable[int], *, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> int:
    """Labels that count in the global batch: those of this DP rank's micro-batches, added up over DP ranks.

    The same number on every rank, so all of them see together that there is nothing to train: documents of one token,
    or masked prompts only. An optimizer that steps then still decays weights and moves by its momentum::

        valid = count_valid_tokens((batch.num_valid_tokens for batch in step.micro_batches), group=dp_group)
        if valid == 0:
            continue  # on every rank; say so in the log

    Args:
        counts: of each micro-batch, over its CP ranks (`PackedBatch.num_valid_tokens`).
        group: the DP group; None for one DP rank.
        device: where the collective runs ("cuda" for NCCL).

    Returns:
        Their number, 0 included.
    """
    total = sum(counts) if isinstance(counts, Iterable) else int(counts)
    if group is not None:
        tensor = torch.tensor(total, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, group=group)
        total = int(tensor.item())
    return total
