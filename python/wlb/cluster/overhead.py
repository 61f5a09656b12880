"""What a trainer takes beside what its layers compute and send: launches, embedding, loss, the optimizer, its own code.

Where steps take milliseconds that is per cents of them. It is measured, not assumed: by default there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._errors import error


def of_group(keys: ArrayLike, cp_size: int) -> NDArray[np.float64]:
    """Keys that a group of `cp_size` ranks gathers, each of which sends so many; none where it is one rank."""
    return np.asarray(keys, dtype=np.float64) * (cp_size if cp_size > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Seconds beside what is predicted from layers and links.

    Args:
        forward: of each stage in the order of the model, seconds of a micro-batch's forward whatever its tokens, those
            for each token of a rank, and those for each key that a group of several ranks gathers, which all of them
            copy.
            They may be below 0 where a profile takes layers for slower than they are.
        backward: the same of the backward.
        gather: seconds of each pass of a micro-batch whose group gathers keys, however many: what starting and awaiting
            collectives takes beside the link's latency.
        step: of every step: the optimizer, clipping, counting tokens, waiting for all ranks to begin.

    Raises:
        WlbError: a value that is not finite, a pass with another number of stages, gathering without passes, or a step
            that takes less than nothing.
    """

    forward: tuple[tuple[float, float, float], ...] = ()
    backward: tuple[tuple[float, float, float], ...] = ()
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

    def passes(self, tokens: ArrayLike, *, gathered: ArrayLike) -> NDArray[np.float64]:
        """float64[m, stages, 3]: of micro-batches with so many tokens on a rank, whose group gathers so many keys.

        All of the backward is in the inputs' gradient.
        """
        count, gathered = np.asarray(tokens, dtype=np.float64), np.asarray(gathered, dtype=np.float64)
        seconds = np.zeros((count.size, len(self.forward), 3))
        for column, lines in enumerate((self.forward, self.backward)):
            for stage, (once, each, key) in enumerate(lines):
                seconds[:, stage, column] = once + each * count + key * gathered + self.gather * (gathered > 0)
        return seconds


NO_OVERHEAD = Overhead()
"""Nothing was measured."""
