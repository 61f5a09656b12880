"""The mean over samples that a step of a round trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._shown import explained

MeanOf: TypeAlias = Literal["token", "sample", "prompt"]


@explained
@dataclass(frozen=True, eq=False)
class RoundMean:
    """The mean that a step of a round trains, and the weights that make it.

    Attributes:
        mean: "token", "sample" or "prompt", as in `wlb.rl.RoundPlan.weights`.
        groups: int64[n]: prompt of each sample of the round.
        weights: float64[n]: what multiplies the losses of a sample's tokens, whose sum over all ranks is divided by the
            number of labels of the step. 0 for a sample without labels.
        averaged_over: by what the loop divides gradients besides.
        count_empty: whether samples (or prompts) without labels count in the mean, as 0.
    """

    mean: MeanOf
    groups: NDArray[np.int64]
    weights: NDArray[np.float64]
    averaged_over: int = 1
    count_empty: bool = False

    @classmethod
    def of(cls, plan: wlb.rl.RoundPlan, loss_tokens: NDArray[np.int64], mean: MeanOf, **options: Any) -> RoundMean:
        """The weights of a plan, times the labels of each step."""
        weights = plan.weights(loss_tokens, mean=mean, **options)
        labels = np.bincount(plan.steps, loss_tokens, len(plan))
        return cls(mean, plan.groups, weights * labels[plan.steps], **options)
