"""Time of a trainer outside of its layers: launches, embedding, loss, the optimizer, its own code.

Where steps take milliseconds that is per cents of them. It is measured, not assumed: by default there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._core import Shard
from wlb._errors import error
from wlb._shown import explained


@explained
@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds beside what is predicted from layers and links.

    Args:
        forward: of each stage in the order of the model, seconds of a micro-batch's forward whatever its tokens, and
            those for each token of a rank. They may be below 0 where a profile takes layers for slower than they are.
        backward: the same of the backward.
        copies: of forward and backward, seconds in a layer for each token of a rank that exchanges keys with others:
            its key is put into the buffer that is sent, and its gradients are added up; and those for each key that
            the rank picks from the gathered ones (`wlb.Shard.keys_picked`).
        gather: seconds of each pass of a micro-batch whose group gathers keys, however many: what starting and awaiting
            collectives takes beside the link's latency.
        step: of every step: the optimizer, clipping, counting tokens, waiting for all ranks to begin.

    Raises:
        WlbError: a value that is not finite, a pass with another number of stages, gathering without passes, or a step
            that takes less than nothing.
    """

    forward: tuple[tuple[float, float], ...] = ()
    backward: tuple[tuple[float, float], ...] = ()
    copies: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    gather: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            values = np.asarray(getattr(self, field.name), dtype=np.float64)
            if not np.isfinite(values).all():
                raise error(field.name, f"= {getattr(self, field.name)}: must be finite", value=values)
        if self.step < 0:
            raise error("step", f"= {self.step}: must not be negative", value=self.step)
        if len(self.forward) != len(self.backward):
            message = f"has {len(self.backward)} stages, forward {len(self.forward)}"
            raise error("backward", message, value=self.backward)
        if self.gather and not self.forward:
            raise error("gather", f"= {self.gather}: is a part of passes, and forward has none", value=self.gather)

    def check(self, *, num_stages: int) -> None:
        """Refuses measurements of another pipeline.

        Raises:
            WlbError: naming the numbers of stages.
        """
        if self.forward and len(self.forward) != num_stages:
            message = f"is of {len(self.forward)} stages: the layout has pp x virtual_stages = {num_stages}"
            raise error("overhead", message, value=self)

    def passes(self, tokens: ArrayLike, *, gathers: ArrayLike) -> NDArray[np.float64]:
        """float64[m, stages, 3]: of micro-batches with so many tokens on a rank, by whether their group gathers keys.

        All of the backward is in the inputs' gradient. What attention copies is a rank's own: see `copying`.
        """
        count, gathers = np.asarray(tokens, dtype=np.float64), np.asarray(gathers, dtype=bool)
        seconds = np.zeros((count.size, len(self.forward), 3))
        for column, lines in enumerate((self.forward, self.backward)):
            for stage, (once, each) in enumerate(lines):
                seconds[:, stage, column] = once + each * count + self.gather * gathers
        return seconds

    def copying(self, copied: ArrayLike) -> NDArray[np.float64]:
        """float64[2, ...]: seconds of forward and backward, in a layer, in which ranks copy so much.

        Args:
            copied: int64[..., 2] of each rank, as `copied` gives them.
        """
        return np.stack([np.asarray(copied) @ np.asarray(one) for one in self.copies])


def copied(shard: Shard) -> NDArray[np.int64]:
    """int64[cp, 2]: of each rank its tokens if it exchanges keys with others, and the keys that it picks."""
    exchanges = (shard.keys_moved > 0) | (shard.keys_gathered > 0)
    return np.stack([shard.tokens_per_rank * exchanges, shard.keys_picked], axis=1)


NO_OVERHEAD = Overhead()
"""Nothing was measured."""
