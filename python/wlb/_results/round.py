"""Results of `wlb.rl.plan`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._arrays import integers
from wlb._core import result
from wlb._errors import check_integer, error
from wlb._results.copied import Copied


@result
@dataclass(frozen=True, eq=False, repr=False)
class RoundPlan(Copied):
    """Which sample of a round is trained in which optimizer step, on which rank, in which micro-batch.

    Plain data that can be printed, compared, pickled and sent. Every array is a fresh copy that the caller may keep or
    change. A round has ``n`` samples and ``S`` steps; micro-batches are counted step by step, rank by rank, in the
    order to run them, ``M`` in all.

    Attributes:
        dp_size: Data-parallel ranks.
        sync: where the ranks wait for each other, once a "step" or in every "micro_batch".
        together: what the samples of a group share: the "step", the "rank" or the "micro_batch".
        num_micro_batches: int64[S]: micro-batches of each rank in each step, the same on all ranks.
        samples: int64[n]: samples in the order to run them, ascending inside a micro-batch.
        offsets: int64[M + 1]: micro-batch ``j`` of all has ``samples[offsets[j]:offsets[j + 1]]``.
        costs: float64[M]: cost of each micro-batch, in the cost model's unit.
        tokens: int64[M]: tokens of each micro-batch.
        step_costs: float64[S]: time of each step: the heaviest rank, or with ``sync="micro_batch"`` the sum of the
            heaviest micro-batch of each round.
        lower_bounds: float64[S]: no plan with these steps and as many micro-batches has shorter ones.
        parted_bounds: float64[S]: the same if the samples of a group were parted inside a step.
        alone: int64[k]: samples with more than ``max_tokens``, each alone in its micro-batch, and those of prompts that
            have more together and stay in one micro-batch.
        imbalance: time of all steps over their time if all ranks were equal in each step.
    """

    dp_size: int
    sync: str
    together: str
    num_micro_batches: NDArray[np.int64]
    samples: NDArray[np.int64]
    offsets: NDArray[np.int64]
    costs: NDArray[np.float64]
    tokens: NDArray[np.int64]
    step_costs: NDArray[np.float64]
    lower_bounds: NDArray[np.float64]
    parted_bounds: NDArray[np.float64]
    alone: NDArray[np.int64]
    imbalance: float
    _costliest: NDArray[np.int64]
    _groups: NDArray[np.int64]
    _digest: str

    @property
    def num_steps(self) -> int:
        """Optimizer steps, ``S``; also ``len()``."""
        return len(self)

    @property
    def groups(self) -> NDArray[np.int64]:
        """int64[n]: prompt of each sample; without ``groups`` each sample is a prompt of its own."""
        groups: NDArray[np.int64] = self._groups.copy()
        return groups

    @property
    def inverse(self) -> NDArray[np.int64]:
        """int64[n]: ``values[inverse]`` has values that came in the order of ``samples`` in the order of the round."""
        inverse = np.empty_like(self.samples)
        inverse[self.samples] = np.arange(inverse.size)
        return inverse

    @property
    def steps(self) -> NDArray[np.int64]:
        """int64[n]: step of each sample."""
        return self._of_samples(np.arange(len(self)).repeat(self.num_micro_batches * self.dp_size))

    @property
    def ranks(self) -> NDArray[np.int64]:
        """int64[n]: rank of each sample."""
        every_rank = np.arange(self.dp_size)
        ranks = [every_rank.repeat(number) for number in self.num_micro_batches.tolist()]
        return self._of_samples(np.concatenate([np.empty(0, np.int64), *ranks]))

    def micro_batches(self, step: int, rank: int) -> list[NDArray[np.int64]]:
        """Samples of each micro-batch that a rank runs in a step, in the order to run them.

        Raises:
            WlbError: no such step or rank.

        Complexity:
            O(samples of the rank in the step).
        """
        check_integer("step", step, minimum=0, maximum=len(self) - 1)
        check_integer("rank", rank, minimum=0, maximum=self.dp_size - 1)
        number = self.num_micro_batches.tolist()
        first = sum(number[:step]) * self.dp_size + rank * number[step]
        bounds = vars(self)["offsets"][first : first + number[step] + 1].tolist()  # not copies of all
        samples = vars(self)["samples"]
        return [samples[begin:end].copy() for begin, end in pairwise(bounds)]

    def weights(
        self,
        loss_tokens: ArrayLike,
        *,
        mean: Literal["token", "sample", "prompt"],
        averaged_over: int | None = None,
        count_empty: bool = False,
    ) -> NDArray[np.float64]:
        """What to multiply each sample's summed token loss by, so that each step trains the mean that is meant.

        The sum of weight times summed token loss, over all samples of a step, all micro-batches and all ranks, is

        - "token": the mean over all tokens with loss of the step;
        - "sample": the mean over samples of each sample's mean over its tokens with loss;
        - "prompt": the mean over prompts (``groups``) of each prompt's mean over the tokens of all its samples.

        It is the same however the samples are packed, accumulated and dealt to ranks.

        Args:
            loss_tokens: int[n], tokens of each sample that bear loss. A sample without any has weight 0.
            mean: the mean that is meant.
            averaged_over: number by which the trainer divides gradients: None for ``dp_size``, as DDP and FSDP average
                over ranks; 1 if they are summed; times the number of micro-batches, if the trainer divides by that
                too. The weights undo it.
            count_empty: whether samples (or prompts) without a token of loss count in the mean, as 0.

        Returns:
            float64[n].

        Raises:
            WlbError: another number of samples, a negative number of tokens, an unknown mean.

        Complexity:
            O(n log n).

        Examples:
            >>> import wlb
            >>> plan = wlb.rl.plan([4, 2, 2], dp_size=1, max_tokens=8, costs=[4, 2, 2])
            >>> plan.weights([3, 1, 0], mean="token")
            array([0.25, 0.25, 0.  ])
            >>> plan.weights([2, 1, 0], mean="sample")
            array([0.25, 0.5 , 0.  ])
        """
        counts = integers("loss_tokens", loss_tokens)
        if counts.size != self.samples.size:
            raise error("loss_tokens", f"has {counts.size} entries, but the plan has {self.samples.size} samples")
        negative = np.flatnonzero(counts < 0)
        if negative.size:
            index, value = int(negative[0]), int(counts[negative[0]])
            raise error("loss_tokens", f"= {value}: must not be negative", index=index, value=value)
        if mean not in ("token", "sample", "prompt"):
            raise error("mean", f'= {mean!r}: must be one of "token", "sample", "prompt"', value=mean)
        if averaged_over is None:
            averaged_over = self.dp_size
        check_integer("averaged_over", averaged_over, minimum=1)
        steps = self.steps
        if mean == "token":
            parts = np.zeros(counts.size, np.int64)
        elif mean == "sample":
            parts = np.arange(counts.size)
        else:
            parts = np.unique(self._groups, return_inverse=True)[1].ravel()
        # A part is what is averaged over its tokens first: the step, a sample, a prompt of the step.
        _, first, part = np.unique(steps * (counts.size + 1) + parts, return_index=True, return_inverse=True)
        tokens = np.bincount(part.ravel(), counts, first.size)
        counted = (tokens > 0) | count_empty
        parts_of_step = np.bincount(steps[first], counted, len(self))
        share = averaged_over / np.maximum(parts_of_step[steps[first]] * tokens, 1)
        return np.where(counts > 0, share[part.ravel()], 0.0)

    def digest(self) -> str:
        """Hex hash of the place of every sample: equal on two ranks if and only if their plans are."""
        return self._digest

    def _of_samples(self, of_micro_batches: NDArray[np.int64]) -> NDArray[np.int64]:
        """A number of each micro-batch as a number of each sample."""
        found = np.empty_like(self.samples)
        found[self.samples] = of_micro_batches.repeat(np.diff(self.offsets))
        return found

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.num_micro_batches)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoundPlan):
            return NotImplemented
        return all(np.array_equal(value, vars(other)[name]) for name, value in vars(self).items())

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        alone = f", alone={self.alone.size}" if self.alone.size else ""
        return (
            f"RoundPlan(steps={len(self)}, ranks={self.dp_size}, micro_batches={len(self.costs)}, "
            f"samples={self.samples.size}, imbalance={self.imbalance:.4f}{alone})"
        )
