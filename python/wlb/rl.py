"""Plans for post-training: the optimizer steps of a round of samples, and the micro-batches of all ranks.

    plan = wlb.rl.plan(lengths, dp_size=8, max_tokens=32768, cost_model=cost, groups=prompts, prompts_per_step=64)
    weights = plan.weights(loss_tokens, mean="sample")
    for step in range(plan.num_steps):
        for samples in plan.micro_batches(step, rank):
            sum(weights[i] * summed_token_loss(i) for i in samples).backward()

A trainer of reinforcement learning or of preferences has a round of samples whose lengths differ a hundred times. All
ranks compute the same plan from the same lengths, without communication. Only numpy is required.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from wlb._core import CostModel, plan_round
from wlb._errors import renamed
from wlb._results import RoundPlan
from wlb._warned import warn

if TYPE_CHECKING:
    from wlb._choices import RoundOrder, RoundOversize, RoundTogether, StepSamples, Sync

__all__ = ["RoundPlan", "plan"]

# A group that makes its step this much longer than with parted groups is named.
_WORTH_PARTING = 1.1


def plan(
    lengths: ArrayLike,
    *,
    dp_size: int,
    max_tokens: int,
    cost_model: CostModel | None = None,
    costs: ArrayLike | None = None,
    num_steps: int | None = None,
    prompts_per_step: int | None = None,
    samples_per_step: int | None = None,
    step_samples: StepSamples = "in_order",
    groups: ArrayLike | None = None,
    together: RoundTogether = "step",
    classes: ArrayLike | None = None,
    class_rounds: bool = False,
    sync: Sync = "step",
    order: RoundOrder = "light_ends",
    oversize: RoundOversize = "error",
    equal_samples: bool = False,
    max_samples: int | None = None,
    num_micro_batches: int | Literal["fewest"] | None = None,
    multiple_of: int = 1,
) -> RoundPlan:
    """Plan a round of samples: optimizer steps, and the micro-batches of all ranks in each step.

    Every sample is trained once. Each step is planned over all ranks at once; in a step all ranks have equally many
    micro-batches.

    Args:
        lengths: int[n], tokens of each sample, prompt and answer.
        dp_size: data-parallel ranks.
        max_tokens: most tokens of a micro-batch, a hard limit.
        cost_model: cost of a sample, from its length. Give it, or `costs`.
        costs: float64[n], cost of each sample in any one unit.
        num_steps: optimizer steps, with equally many prompts each (they differ by at most one). Without a number or a
            size of steps there is one step.
        prompts_per_step: prompts of a step; needs `groups`. The number of steps is the one whose steps are nearest to
            this size; then all have equally many prompts. No prompt is dropped.
        samples_per_step: samples of a step, nearly: prompts stay whole. The number of steps is the one whose steps are
            nearest to this size.
        step_samples: the samples that a step takes: the next ones "in_order", or those with which all steps have
            "even" work.
        groups: int[n], prompt of each sample; by default each sample is a prompt of its own. The samples of a prompt
            are always in one step.
        together: what the samples of a prompt share: the "step", and they may go to any rank; the "rank"; or the
            "micro_batch".
        classes: int[n]: samples of two classes never share a micro-batch (policy versions, adapters).
        class_rounds: all ranks run micro-batches of one class in the same round (images, so that all ranks of FSDP
            enter the encoder together). A class with fewer samples than ranks leaves micro-batches empty.
        sync: where the ranks wait for each other: once a "step", or in every "micro_batch" (FSDP, ZeRO-3).
        order: order in which the ranks run their micro-batches. Rounds stay whole: the ranks run their r-th heaviest
            micro-batches at the same time. "light_ends": the lightest rounds at both ends, where a pipeline fills and
            drains; "heaviest_first": by work, so that the allocator reserves its most at once; "given": by their
            first samples.
        oversize: a sample with more than `max_tokens` is an "error", or is "alone" in its micro-batch
            (`RoundPlan.alone`). A prompt that stays in one micro-batch and has more together likewise.
        equal_samples: all ranks get equally many samples of a step (they differ by at most one).
        max_samples: most samples of a micro-batch.
        num_micro_batches: micro-batches of a step on all ranks together: a number; "fewest"; or None for as few as
            make the step short, as in `wlb.pack`.
        multiple_of: if that number is not given, it is a multiple of this; of ``dp_size * pp_size`` for a pipeline.

    Returns:
        RoundPlan. The same input gives the same plan, byte for byte, on every rank and machine. A rank that has fewer
        samples of a step than micro-batches has empty ones, which it must run too.

    Raises:
        WlbError: as `wlb.pack`; two of the three that say what a step is; more steps than prompts;
            `prompts_per_step` without `groups`; a group of two classes with ``together="micro_batch"``.

    Warns:
        UserWarning: a prompt costs so much more than a rank's share that its step takes over 1.1 times as long as
            with parted prompts. The message names the prompt.

    O(n log n) and a bounded number of exchanges for each step. Releases the GIL from 1,024 samples on.

    Examples:
        >>> import wlb
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> plan = wlb.rl.plan([900, 100, 500, 400, 300, 800], dp_size=2, max_tokens=1000, cost_model=cost,
        ...                    groups=[0, 0, 0, 1, 1, 1], prompts_per_step=1)
        >>> [samples.tolist() for samples in plan.micro_batches(step=0, rank=1)]
        [[1, 2]]
        >>> plan.num_micro_batches
        array([1, 1])
    """
    with renamed(equal_documents="equal_samples", max_documents="max_samples"):
        found: RoundPlan = plan_round(
            lengths,
            dp_size=dp_size,
            max_tokens=max_tokens,
            cost_model=cost_model,
            costs=costs,
            num_steps=num_steps,
            prompts_per_step=prompts_per_step,
            samples_per_step=samples_per_step,
            step_samples=step_samples,
            groups=groups,
            together=together,
            classes=classes,
            class_rounds=class_rounds,
            sync=sync,
            order=order,
            oversize=oversize,
            equal_samples=equal_samples,
            max_samples=max_samples,
            num_micro_batches=num_micro_batches,
            multiple_of=multiple_of,
        )
    _name_costly_prompts(found)
    return found


def _name_costly_prompts(plan: RoundPlan) -> None:
    """Warns of the step that whole prompts make longer by the most."""
    longer = plan.lower_bounds / np.maximum(plan.parted_bounds, np.finfo(float).tiny)
    if not longer.size or longer.max() < _WORTH_PARTING:
        return
    step = int(longer.argmax())
    micro_batches = int(plan.num_micro_batches[step]) * plan.dp_size
    first = int(plan.num_micro_batches[:step].sum()) * plan.dp_size
    even = plan.costs[first : first + micro_batches].sum() / plan.dp_size
    prompt = int(plan._groups[plan._costliest[step]])
    what = f"with together={plan.together!r} step {step} takes {plan.step_costs[step] / even:.2f} times an even step"
    way = f'together="step" parts it between ranks: {plan.parted_bounds[step] / even:.2f} times is then possible'
    warn(f"groups: prompt {prompt} costs more than a rank's share, so that {what}. {way}")
