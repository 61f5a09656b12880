"""A loss that does not depend on packing: every token of the global batch has the same weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from wlb._errors import check_integer, error
from wlb.reading.documents import IGNORE
from wlb.torch.collectives import device_of
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.forest import ForestBatch
from wlb.torch.data.step import Step
from wlb.torch.groups import ranks_of_step


def token_normalized_loss(
    logits: Tensor,
    labels: Tensor | ForestBatch,
    *,
    num_valid_tokens: int | Tensor,
    ignore_index: int = IGNORE,
    weights: Tensor | None = None,
) -> Tensor:
    """This rank's part of the mean cross-entropy over the whole global batch.

    The sum over all micro-batches, CP ranks and DP ranks is the mean: add gradients up, do not average them
    (`sum_gradients`). A mean for each micro-batch, then over micro-batches, would weigh
    tokens of short micro-batches more.

    Args:
        logits: float[tokens, vocabulary]; may have 0 tokens. Computed in fp32, of float64 in
            float64.
        labels: int64[tokens], `ignore_index` for tokens without a label. Or the `ForestBatch` of the logits: then an
            edge counts once for each sample that predicts it.
        num_valid_tokens: number of labels that count in the whole global batch (`count_valid_tokens`). If it is 0, the
            loss and its gradients are 0, so that a rank can run such a batch with the others; do not step the optimizer
            then. The value of a tensor is not read, since that would wait for the device.
        ignore_index: as in `torch.nn.functional.cross_entropy`.
        weights: float[tokens], factor of each label's loss: `batch.columns.get("loss_weights")`. The sum is still
            divided by the number of labels.

    Returns:
        A scalar, float32 (float64 for float64 logits).

    Raises:
        WlbError: for shapes that do not fit, an int below 0, or 0 where a label counts.
    """
    if logits.ndim != 2:
        raise error(
            "logits", f"has shape {tuple(logits.shape)}: must be [tokens, vocabulary]", value=tuple(logits.shape)
        )
    if isinstance(labels, ForestBatch):
        logits, labels, weights = _of_edges(logits, labels, weights)
    if labels.shape != logits.shape[:1]:
        shape = tuple(labels.shape)
        raise error("labels", f"has shape {shape}: must be [{logits.shape[0]}], the tokens of logits", value=shape)
    if not isinstance(num_valid_tokens, Tensor):
        check_integer("num_valid_tokens", num_valid_tokens, minimum=0)
        if num_valid_tokens == 0 and bool((labels != ignore_index).any()):
            message = f"= 0, but labels other than ignore_index = {ignore_index} are here: count them over all ranks"
            raise error("num_valid_tokens", message, value=num_valid_tokens)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if weights is None:
        total = F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="sum")
    else:
        if weights.shape != labels.shape:
            shape = tuple(weights.shape)
            raise error("weights", f"has shape {shape}: must be [{labels.shape[0]}], as labels", value=shape)
        losses = F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="none")
        total = (losses * weights.to(wide.dtype)).sum()
    # Without labels the sum is 0; divide by at least 1, since 0 / 0 is NaN.
    at_least_1 = num_valid_tokens.clamp(min=1) if isinstance(num_valid_tokens, Tensor) else max(num_valid_tokens, 1)
    return total / at_least_1


def _of_edges(logits: Tensor, batch: ForestBatch, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and weights of the edges of a forest."""
    if weights is not None:
        message = "are not taken beside a ForestBatch: it has weights of its own. Weigh what to_samples gives instead"
        raise error("weights", message, value=tuple(weights.shape))
    tokens = batch.tokens.numel()
    if logits.shape[0] != tokens:
        shape = tuple(logits.shape)
        raise error("logits", f"has shape {shape}: must be [{tokens}, vocabulary], the tokens of labels", value=shape)
    return logits.index_select(0, batch.edge_rows), batch.edge_targets, batch.edge_weights


def count_valid_tokens(
    step: Step[Any] | DynamicCpStep[Any],
    *,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Number of labels that count in a global batch, each once, over all ranks that share it.

    Every rank gets the same number, so all of them notice together if there is nothing to train (documents of one
    token, or masked prompts only). An optimizer step would then still decay weights and move by its momentum::

        ranks = wt.data_and_context(mesh).get_group()
        valid = count_valid_tokens(step, group=ranks)
        if valid == 0:
            continue  # on every rank; say so in the log

    Args:
        step: a step from a loader. Its micro-batches are `PackedBatch` or `ForestBatch`: the first context-parallel
            rank counts their labels, those of a forest once for each sample. Or they are mappings with `labels`, on one
            context-parallel rank.
        group: the ranks that share the step, data- and context-parallel; None for all.

    Returns:
        Their number, 0 included.

    Raises:
        WlbError: the ranks of `group` are not those that share the step: their number differs, or several of them have
            the same part of it; or labels of a micro-batch cannot be counted.

    Complexity:
        One all-reduce of a number for each part of the step (micro-batches times context-parallel ranks).
    """
    total = sum(map(_labels, step.micro_batches))
    group = ranks_of_step(step, group)
    if step.num_ranks == 1:
        return total
    mine = torch.zeros(1 + step.num_ranks * len(step.parts), dtype=torch.int64)
    mine[0] = total
    mine[1 + torch.from_numpy(step.parts)] = 1
    everyone = mine.to(device_of(group))
    dist.all_reduce(everyone, group=group)
    total, holders = int(everyone[0]), everyone[1:].cpu()
    if (holders != 1).any():
        wrong = int((holders != 1).nonzero()[0])
        ranks = int(holders[wrong])
        message = (
            f"does not share step {step.number}: {ranks} of its {step.num_ranks} ranks have part {wrong} of "
            f"{len(holders)}, not 1. Give group=wt.data_and_context(mesh).get_group(), and loaders the dp and cp ranks "
            "of the same mesh"
        )
        raise error("group", message, value=ranks)
    return total


def _labels(batch: Any) -> int:
    """Number of labels that this rank counts for a micro-batch; its other context-parallel ranks count none.

    Raises:
        WlbError: it has no labels in a known form.
    """
    if isinstance(batch, PackedBatch | ForestBatch):
        return batch.num_valid_tokens if batch.cp_rank == 0 else 0
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        name = type(batch).__name__
        raise error("step", f"has micro-batches of type {name} without labels: count its labels yourself", value=name)
    return int((labels != IGNORE).sum())
