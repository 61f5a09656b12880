"""Options of packing and waiting."""

from __future__ import annotations

from typing import Annotated

from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from wlb._choices import Release
from wlb._core import MAX_MEAN_DELAY
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.model import Cost
from wlb_tools.command.inputs.options import BATCHES, WAITING, Numbers, Options, Tokens, options
from wlb_tools.simulation.methods import Setup


@options
class Limits(Options):
    """The longest document and the largest micro-batch.

    Args:
        context: context window in tokens: the longest document. A global batch has this many tokens for each
            micro-batch.
        max_tokens: the most tokens of a micro-batch of variable length; by default 1.5 contexts.
    """

    context: Annotated[int, BATCHES, Tokens] = 131072
    max_tokens: Annotated[int | None, BATCHES, Tokens] = None

    def token_limit(self) -> int | None:
        """The most tokens of a micro-batch that the options give, or None without them."""
        if self.max_tokens is not None and self.max_tokens < self.context:
            raise CliError(
                f"--max-tokens {self.max_tokens:,}: below --context {self.context:,}, so the longest documents fit"
                " nowhere"
            )
        return self.max_tokens


@options
class Delay(Options):
    """Limits on how long documents may wait.

    Args:
        max_mean_delay: limit of the mean delay of a token for tuning, in iterations.
        max_delay: most iterations that a document waits; by default there is no limit.
        max_step_cost: with adaptive release: most work of a step, in mean global batches, such as 1.5; long documents
            are then spread over steps. By default there is no bound.
    """

    max_mean_delay: Annotated[NonNegativeFloat, WAITING] = MAX_MEAN_DELAY
    max_delay: Annotated[NonNegativeInt | None, WAITING] = None
    max_step_cost: Annotated[PositiveFloat | None, WAITING] = None


@options
class Batches(Limits):
    """Global batches.

    Args:
        num_micro_batches: micro-batches of a global batch: pp x dp.
    """

    num_micro_batches: PositiveInt = 16

    def setup(self, cost: Cost, delay: Delay, *, dp_size: int = 1) -> Setup:
        """Settings that all methods share."""
        return Setup(
            num_micro_batches=self.num_micro_batches,
            context=self.context,
            max_tokens=self.token_limit() or self.context * 3 // 2,
            cost_model=cost.of_documents(),
            dp_size=dp_size,
            max_delay=delay.max_delay,
            max_step_cost=delay.max_step_cost,
        )


@options
class Held(Delay):
    """Options about documents that wait.

    Args:
        release: fifo: queues with thresholds. adaptive: no thresholds; a document waits if that makes the step faster.
        delay_price: with adaptive release: price of one step of delay for a global batch, as a part of an even
            step, such as 0.03; at a higher price fewer documents wait. By default it is tuned to --max-mean-delay.
        num_queues: number of outlier queues, whose thresholds are tuned.
        outlier_thresholds: thresholds of the queues in tokens, ascending, such as 49152,98304; then none are tuned.
    """

    release: Release = "fifo"
    delay_price: NonNegativeFloat | None = None
    num_queues: NonNegativeInt = 2
    outlier_thresholds: Annotated[tuple[int, ...] | None, Numbers] = None
