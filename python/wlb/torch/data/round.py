"""Makes a rank's part of an optimizer step of a round of samples (`wlb.rl.plan`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

import wlb
from wlb._arrays import integers
from wlb._errors import check_integer, error
from wlb.reading.documents import WEIGHTS
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.collate import collate
from wlb.torch.data.mean import MeanOf, RoundMean
from wlb.torch.data.step import Step


def round_step(
    samples: Sequence[Any],
    plan: wlb.rl.RoundPlan,
    *,
    step: int,
    lengths: ArrayLike,
    loss_tokens: ArrayLike,
    mean: MeanOf,
    averaged_over: int = 1,
    count_empty: bool = False,
    number: int | None = None,
    dp_rank: int = 0,
    cp_rank: int = 0,
    cp_size: int = 1,
    multiple_of_tokens: int = 1,
) -> Step[PackedBatch]:
    """This rank's part of an optimizer step of a round, as `train_step` and `verify` take it.

    Each batch has `columns["loss_weights"]`, float32 [tokens]: the factors with which the sum of the losses of all
    labels, divided by the number of labels of the step, is the mean that is meant. `train_step` applies them. A `loss`
    of your own multiplies its values by them and divides by the number of labels that it gets.

    Args:
        samples: all samples of the round: anything with indices. Only those of this rank are read. Each is what
            `wlb.torch.collate` takes as a document.
        plan: of `wlb.rl.plan`, the same on all ranks.
        step: the optimizer step of the plan.
        lengths: int[n], tokens of each sample, as the plan got them.
        loss_tokens: int[n], labels of each sample: tokens that are predicted and bear loss. A rank needs those of all
            samples.
        mean: the mean over the samples of the step: over "token", "sample" or "prompt", as in `RoundPlan.weights`.
        averaged_over: by what your loop divides gradients besides: the data-parallel ranks, for a loop under DDP or
            FSDP that keeps their average. `train_step` adds gradients up, so it takes 1.
        count_empty: whether samples (or prompts) without labels count in the mean, as 0.
        number: steps before this one, since the run began; None: `step`.
        dp_rank: this rank among the plan's data-parallel ranks.
        cp_rank: this rank in the context-parallel group.
        cp_size: ranks of that group.
        multiple_of_tokens: as `wlb.torch.collate` takes it.

    Returns:
        The step. Its `packing` holds the samples of this optimizer step under their numbers in the round; a sample's
        cost is its share, by tokens, of the cost of its micro-batch.

    Raises:
        wlb.WlbError: another number of samples than planned; a sample has other labels than `loss_tokens` says, or
            another length than planned; no such step or rank; and for what `collate` refuses.

    Complexity:
        O(tokens of this rank's samples + n log n).

    Examples:
        >>> import wlb, wlb.torch as wt
        >>> samples = [[5, 6, 7, 8], [5, 6, 1], [9, 2]]
        >>> plan = wlb.rl.plan([4, 3, 2], dp_size=1, max_tokens=5, costs=[4, 3, 2])
        >>> step = wt.round_step(samples, plan, step=0, lengths=[4, 3, 2], loss_tokens=[3, 2, 1], mean="sample")
        >>> [batch.document_ids.tolist() for batch in step.micro_batches]
        [[0], [1, 2]]
        >>> step.micro_batches[1].columns["loss_weights"]
        tensor([1., 1., 1., 2., 2.])
    """
    sizes, counts = integers("lengths", lengths), integers("loss_tokens", loss_tokens)
    for name, found in (("samples", len(samples)), ("lengths", sizes.size)):
        if found != plan.samples.size:
            message = f"are {found}, but the plan has {plan.samples.size} samples: give those of the whole round"
            raise error(name, message, value=found)
    held = plan.micro_batches(step, dp_rank)  # checks both
    check_integer("cp_rank", cp_rank, minimum=0, maximum=cp_size - 1)
    weighs = RoundMean.of(plan, counts, mean, averaged_over=averaged_over, count_empty=count_empty)
    packing = _packing(plan, step, sizes)
    indices = np.arange(len(held)) + dp_rank * len(held)
    batches = []
    for numbers in held:
        batch = collate(
            [samples[sample] for sample in numbers.tolist()],
            cp_rank=cp_rank,
            cp_size=cp_size,
            document_ids=numbers,
            multiple_of_tokens=multiple_of_tokens,
        )
        _check(batch, numbers, sizes, counts)
        batches.append(_weighted(batch, weighs.weights[numbers]))
    return Step(step if number is None else number, 0, packing, indices, batches, mean=weighs)


def _packing(plan: wlb.rl.RoundPlan, step: int, lengths: NDArray[np.int64]) -> wlb.Packing:
    """The micro-batches of a step, rank by rank. Samples of other steps are left over."""
    micro_batch = np.repeat(np.arange(plan.costs.size), np.diff(plan.offsets))
    first = int(plan.num_micro_batches[:step].sum()) * plan.dp_size
    number = int(plan.num_micro_batches[step]) * plan.dp_size
    assignment = np.full(plan.samples.size, -1)
    here = (micro_batch >= first) & (micro_batch < first + number)
    assignment[plan.samples[here]] = micro_batch[here] - first
    of_sample = np.empty(plan.samples.size, np.int64)
    of_sample[plan.samples] = micro_batch
    costs = plan.costs[of_sample] * lengths / plan.tokens[of_sample]
    most = max(int(plan.tokens.max(initial=1)), 1)
    return wlb.Packing.from_assignment(lengths, assignment, num_micro_batches=number, max_tokens=most, costs=costs)


def _check(batch: PackedBatch, numbers: NDArray[np.int64], sizes: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
    """Refuses samples of other lengths or with another number of labels than those given."""
    found = batch.shard.lengths[: numbers.size]
    for at in np.flatnonzero(found != sizes[numbers])[:1].tolist():
        number, given = int(numbers[at]), int(sizes[numbers[at]])
        message = f"has {found[at]} tokens, but lengths[{number}] = {given}"
        raise error("samples", message, index=number, value=int(found[at]))
    labels = int(counts[numbers].sum())
    if batch.num_valid_tokens != labels:
        message = f"say {labels} for samples {numbers.tolist()}, which have {batch.num_valid_tokens} labels"
        raise error("loss_tokens", f"{message}: count tokens that are predicted and bear loss", value=labels)


def _weighted(batch: PackedBatch, weights: NDArray[np.float64]) -> PackedBatch:
    """The batch with the weight of each token's sample, times the weight that the token had; padding has 0."""
    ends = np.cumsum(batch.shard.lengths)
    sample = np.searchsorted(ends, batch.shard.rank(batch.cp_rank).token_indices, side="right")
    of_tokens = torch.from_numpy(np.append(weights, 0.0)[sample].astype(np.float32))
    held = batch.columns.get(WEIGHTS)
    return replace(batch, columns={**batch.columns, WEIGHTS: of_tokens if held is None else held * of_tokens})
