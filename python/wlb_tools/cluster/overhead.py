"""Time of a trainer outside its layers: launches, embedding, loss, the optimizer, its own code.

If steps take milliseconds, this is a few per cent of them. It is measured, not assumed: the default is none.
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
    """Seconds besides those predicted from layers and links.

    Args:
        forward: for each stage in the order of the model, seconds of a micro-batch's forward pass that do not depend on
            its tokens, and seconds for each token of a rank. They may be negative if a profile has too long times of
            layers.
        backward: the same for the backward pass.
        copies: for forward and backward pass, seconds in a layer for each token of a rank that exchanges keys with
            others, because its key is copied into the buffer to send and its gradients are added; and for each key that
            the rank picks from the gathered ones (`wlb.Shard.keys_picked`).
        gather: seconds of each pass of a micro-batch whose group gathers keys, for starting and awaiting collectives,
            besides the link's latency.
        step: of every step: the optimizer, clipping, counting tokens, waiting until all ranks begin.

    Raises:
        WlbError: a value is not finite, passes have different numbers of stages, gathering is given without passes, or
            a step takes negative time.
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
        """Refuses measurements of a pipeline with another number of stages.

        Raises:
            WlbError: naming the numbers of stages.
        """
        if self.forward and len(self.forward) != num_stages:
            message = f"is of {len(self.forward)} stages: the layout has pp x virtual_stages = {num_stages}"
            raise error("overhead", message, value=self)

    def passes(self, tokens: ArrayLike, *, gathers: ArrayLike) -> NDArray[np.float64]:
        """float64[m, stages, 3]: for micro-batches with these tokens on a rank, by whether their group gathers keys.

        All time of the backward pass is in the gradient of inputs. Copies of attention are separate: see `copying`.
        """
        count, gathers = np.asarray(tokens, dtype=np.float64), np.asarray(gathers, dtype=bool)
        seconds = np.zeros((count.size, len(self.forward), 3))
        for column, lines in enumerate((self.forward, self.backward)):
            for stage, (once, each) in enumerate(lines):
                seconds[:, stage, column] = once + each * count + self.gather * gathers
        return seconds

    def copying(self, copied: ArrayLike) -> NDArray[np.float64]:
        """float64[2, ...]: seconds of copies in a layer, in forward and backward pass.

        Args:
            copied: int64[..., 2] for each rank, from the function `copied`.
        """
        return np.stack([np.asarray(copied) @ np.asarray(one) for one in self.copies])


def copied(shard: Shard) -> NDArray[np.int64]:
    """int64[cp, 2]: for each rank its tokens, or 0 if it exchanges no keys, and the keys that it picks."""
    exchanges = (shard.keys_moved > 0) | (shard.keys_gathered > 0)
    return np.stack([shard.tokens_per_rank * exchanges, shard.keys_picked], axis=1)


NO_OVERHEAD = Overhead()
"""Overhead of 0, the default."""
