"""Lists of samples for each micro-batch, for trainers of reinforcement learning and fine-tuning.

Trainers that pack samples by tokens (OpenRLHF, SkyRL, slime and others) take such lists. Needs no framework.

    for micro_batch in rl.plan(lengths, dp_size=8, max_tokens=16384, cost_model=cost, groups=prompts)[rank]:
        train(samples[index] for index in micro_batch)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from numpy.typing import ArrayLike

import wlb
from wlb._errors import renamed

if TYPE_CHECKING:
    from wlb._choices import Sync, Together

__all__ = ["plan"]


def plan(
    lengths: ArrayLike,
    *,
    dp_size: int,
    max_tokens: int,
    cost_model: wlb.CostModel | None = None,
    costs: ArrayLike | None = None,
    sync: Sync = "step",
    groups: ArrayLike | None = None,
    together: Together = "rank",
    equal_samples: bool = False,
    max_samples: int | None = None,
    num_micro_batches: int | Literal["fewest"] | None = None,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """The micro-batches of every data-parallel rank, from the lengths of all samples. Needs no communication.

    Args:
        lengths: int[n], tokens of each sample, prompt and answer.
        dp_size: data-parallel ranks.
        max_tokens: most tokens of a micro-batch, a hard limit.
        cost_model: what samples cost, by their lengths; or
        costs: float64[n], what each sample costs.
        sync: where ranks wait for each other: once a "step", or in every "micro_batch" (FSDP).
        groups: int[n]: samples with the same number (those of one prompt, or of one pair) stay together.
        together: where they do: on one "rank", or in one "micro_batch", for losses that need all of a group at once
            (DPO, reward models).
        equal_samples: whether every rank has equally many samples; if `dp_size` does not divide them, they differ by
            one.
        max_samples: most samples of a micro-batch.
        num_micro_batches: micro-batches of all ranks together: a number; "fewest"; or None for as few as make the step
            short, as in `wlb.pack`.
        multiple_of: the number of micro-batches of all ranks is a multiple of it, if it is not given.

    Returns:
        For each rank, for each of its micro-batches in the order to run them, the indices of its samples, ascending.
        All ranks have equally many micro-batches. One is empty only on a rank with fewer samples.

    Raises:
        WlbError: as `wlb.pack`.
    """
    with renamed(equal_documents="equal_samples", max_documents="max_samples"):
        packing = wlb.pack(
            lengths,
            num_micro_batches=num_micro_batches,
            max_tokens=max_tokens,
            cost_model=cost_model,
            costs=costs,
            dp_size=dp_size,
            sync=sync,
            groups=groups,
            together=together,
            equal_documents=equal_samples,
            max_documents=max_samples,
            multiple_of=multiple_of,
        )
    return [[packing[index].document_ids.tolist() for index in row] for row in packing.deal(dp_size).tolist()]
