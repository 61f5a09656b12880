"""Learning-rate schedules of runs that resume with steps of another size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from wlb._warned import warn
from wlb.reading.state import field


@dataclass(frozen=True)
class Pace:
    """How far each step of the run moves a schedule, which counts steps of the size that the run began with.

    A run that resumes with steps of half as many tokens takes twice as many of them. Each moves the schedule by half a
    step, so that the learning rate follows the documents.

    Attributes:
        tokens: tokens that a step of the schedule reads on average.
        each: tokens that a step of the run reads on average.
        step: optimizer steps of the run before its steps had this size.
        position: steps of the schedule before that.
    """

    tokens: int
    each: int
    step: int = 0
    position: float = 0.0

    @classmethod
    def resumed(cls, state: Mapping[str, Any], step: int, each: int, *, counted: bool) -> Pace:
        """The pace from an optimizer step on.

        Args:
            state: result of `state_dict`.
            step: optimizer steps before.
            each: tokens of a step from now on.
            counted: whether the user gave the number of steps, so that each is one step of the schedule.

        Raises:
            wlb.WlbError: it is no such state.
        """
        sizes = field(state, "tokens", int), field(state, "each", int), field(state, "step", int)
        before = cls(*sizes, field(state, "position", float))
        after = cls(each if counted else before.tokens, each, step, before.at(step))
        return before if (after.tokens, after.each) == (before.tokens, before.each) else after

    def at(self, step: int) -> float:
        """Steps of the schedule after a number of optimizer steps."""
        return self.position + (step - self.step) * self.each / self.tokens

    def length(self, steps: int) -> int:
        """Steps of the schedule after a number of optimizer steps, rounded: the length of a schedule for the run."""
        return math.floor(self.at(steps) + 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, from which `resumed` continues."""
        return asdict(self)

    def set(self, scheduler: Any, step: int) -> None:
        """Makes a scheduler follow this pace; its owner calls `step()` once in each optimizer step.

        Args:
            scheduler: any of torch's.
            step: optimizer steps before the next call.

        Warns:
            UserWarning: the scheduler cannot be changed, and continues at the step that it had reached.
        """
        if isinstance(scheduler, ReduceLROnPlateau):
            return  # `ReduceLROnPlateau` follows a measured loss, and counts no steps
        own = type(scheduler).__dict__.get("_wlb_own", type(scheduler))
        if self.each == self.tokens:
            if own is not type(scheduler):
                scheduler.__class__ = own
        elif not isinstance(scheduler, LRScheduler) or own.__name__ == "LayerWiseDummyScheduler":
            self.warn(own.__name__)
        else:
            scheduler.__class__ = _paced(own, self, step)

    def warn(self, scheduler: str) -> None:
        """Warns that a scheduler counts steps of the present size like steps of the former size.

        Warns:
            UserWarning: the sizes differ.
        """
        if self.each != self.tokens:
            warn(
                f"{scheduler} takes a step with each of the run's, which read {self.each} tokens now; it was made for "
                f"steps of {self.tokens}, so that its learning rates are those of another part of the training"
            )


def _paced(own: type[Any], pace: Pace, step: int) -> type[Any]:
    """A class to put in front of a scheduler's own. The scheduler's state stays as it is."""
    steps = step

    def take(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal steps
        if args or kwargs:  # the caller gives the step
            return own.step(self, *args, **kwargs)  # type: ignore[no-any-return]
        steps += 1
        for _ in range(pace.length(steps) - pace.length(steps - 1)):
            own.step(self)
        return None

    return type(own.__name__, (own,), {"step": take, "_wlb_own": own, "__doc__": own.__doc__})
