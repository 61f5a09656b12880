"""What the packing commands without a cluster have in common: global batches, and what may wait."""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveInt

from wlb.cli.inputs.options import PANELS, Options, options


@options(PANELS["batches"])
@dataclass(frozen=True, kw_only=True)
class Batches(Options):
    """Global batches.

    Args:
        num_micro_batches: micro-batches of a global batch: pp x dp.
        context: context window in tokens: the longest document. A global batch holds so many per micro-batch.
    """

    num_micro_batches: PositiveInt = 16
    context: PositiveInt = 131072


@options(PANELS["waiting"])
@dataclass(frozen=True, kw_only=True)
class Waiting(Options):
    """How long documents may wait.

    Args:
        max_mean_delay: tuning keeps the mean delay of a token below this, in iterations.
        max_delay: no document waits for more iterations than this; by default there is no limit.
    """

    max_mean_delay: NonNegativeFloat = 0.6
    max_delay: NonNegativeInt | None = None
