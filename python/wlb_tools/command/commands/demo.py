"""`wlb demo`: every method on the same stream of real documents."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts.types import NonNegativeInt, PositiveInt

from wlb_tools.command.inputs.model import Cost
from wlb_tools.command.inputs.options import (
    BATCHES,
    COST,
    DOCUMENTS,
    GLOBAL_BATCHES,
    HELD,
    OUTPUT,
    CommandLine,
    options,
    settings,
)
from wlb_tools.command.inputs.packing import Batches, Delay, Held
from wlb_tools.command.inputs.stream import Reading
from wlb_tools.command.output.console import Output
from wlb_tools.command.output.packing import packing_report
from wlb_tools.command.packing import collect, cp_balance, wlb_plan
from wlb_tools.command.words import counted
from wlb_tools.simulation.methods import fixed_length, original

WINDOWS = (1, 2, 4, 8)
QUEUES = (0, 1, 2, 3)
_TUNED_SHARE = 4  # thresholds are tuned on the first 1/4 of the stream


@options
class Shuffled(Reading):
    """Documents in random order."""

    seed: NonNegativeInt | None = 0


def demo(
    sources: tuple[str, ...] = (),
    /,
    *,
    reading: Annotated[Shuffled, DOCUMENTS] = Shuffled(),
    batches: Annotated[Batches, GLOBAL_BATCHES] = Batches(),
    steps: Annotated[PositiveInt, BATCHES] = 200,
    delay: Annotated[Delay, HELD] = Delay(),
    cost: Annotated[Cost, COST] = Cost(),
    output: Annotated[Output, OUTPUT] = Output(),
    command_line: CommandLine,
) -> None:
    """Compares the packing methods on real documents: balance, delay, memory and planning time.

    Documents arrive in random order. Every method gets the same global batches: the original order, fixed
    lengths packed over 1, 2, 4 and 8 steps at once, WLB-LLM with 0 to 3 queues (fewer, if more do not help), and wlb.
    Thresholds and the price of delay are tuned on the first quarter of the stream. A second table shows the two ways to
    shard a micro-batch over context-parallel ranks.

    Args:
        sources: documents, as for `wlb lengths`; by default the Python files of this interpreter and its packages.
        steps: global batches to form.
    """
    setup = batches.setup(cost, delay)
    with output.progress() as bars:
        stream = reading.stream(sources, setup, bars, steps=steps)
        output.folder("demo")
        tuned = max(1, stream.batches // _TUNED_SHARE)
        plans = [collect("original order", original(stream, setup), stream, bars)]
        for window in WINDOWS:
            packed = fixed_length(stream, setup, window)
            plans.append(collect(f"fixed length, {counted(window, 'step')} at once", packed, stream, bars))
        waiting = Held(**dataclasses.asdict(delay))
        for queues in QUEUES:
            held = dataclasses.replace(waiting, num_queues=queues)
            plan, _ = wlb_plan(stream, setup, held, bars, tuned_batches=tuned, queues=queues)
            if plan.thresholds != plans[-1].thresholds or not queues:  # tuning may do with fewer queues
                plans.append(plan)
        held = dataclasses.replace(waiting, release="adaptive")
        plan, price = wlb_plan(stream, setup, held, bars, tuned_batches=tuned)
        plans.append(plan)
        report = packing_report(
            "demo",
            stream,
            setup,
            plans,
            cp_balance(plan, bars),
            settings=settings(batches, cost, reading, delay)
            | {
                "attention_efficiency": cost.shown_efficiency(),
                "max_tokens": setup.max_tokens,
                "tuned_batches": tuned,
            },
            remark=f"{cost.in_words()} Thresholds and the price of delay ({price:g}) are tuned on the first {tuned:,}"
            f" global batches, for a mean delay of at most {counted(delay.max_mean_delay, 'step')}, and then tried"
            " on all of them.",
        )
    output.write(report, command_line)
